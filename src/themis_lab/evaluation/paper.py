"""The plan of the paper's evaluation: its ten models, four perturbations and four baselines."""

from __future__ import annotations

from typing import Any

from themis_lab.evaluation.plan import EvaluationPlan

MODELS: dict[str, dict[str, Any]] = {
    "lenet1-mnist": {"row": "MNIST (LeNet-1)"},
    "lenet4-mnist": {"row": "MNIST (LeNet-4)"},
    "lenet5-mnist": {"row": "MNIST (LeNet-5)"},
    "mlp-pdf": {"row": "Contagio (<200,200>)"},
    "mlp-drebin": {"row": "Drebin (<200,10>)"},
    "vgg19-imagenet": {"row": "ImageNet (VGG-19)"},
    "resnet50-imagenet": {"row": "ImageNet (ResNet-50)"},
    "dave2-udacity": {"row": "Udacity (DAVE-2)"},
    "resnet56-cifar10": {"row": "Cifar10 (ResNet56)"},
    "densenet121-cifar10": {"row": "Cifar10 (DenseNet121)"},
    "efficientnet-lite0-imagenet": {"row": "ImageNet (EfficientNet-Lite0, a substitute)"},
}
LARGE = ("vgg19-imagenet", "resnet50-imagenet", "densenet121-cifar10", "efficientnet-lite0-imagenet")
"""Models with millions of neurons; one neuron per channel is also how the paper counts them on ImageNet."""
PAPER_R: dict[str, dict[str, float]] = {
    "lenet1-mnist": {"cw": 0.79, "fgsm": 0.77, "pgd": 0.72, "gaussian": 0.70},
    "lenet4-mnist": {"cw": 0.72, "fgsm": 0.74, "pgd": 0.77, "gaussian": 0.72},
    "lenet5-mnist": {"cw": 0.71, "fgsm": 0.83, "pgd": 0.71, "gaussian": 0.89},
    "mlp-pdf": {"cw": 0.71, "fgsm": 0.77, "pgd": 0.78, "gaussian": 0.77},
    "mlp-drebin": {"cw": 0.70, "fgsm": 0.81, "pgd": 0.71, "gaussian": 0.82},
    "vgg19-imagenet": {"cw": 0.79, "fgsm": 0.86, "pgd": 0.75, "gaussian": 0.84},
    "resnet50-imagenet": {"cw": 0.71, "fgsm": 0.74, "pgd": 0.78, "gaussian": 0.86},
    "dave2-udacity": {"cw": 0.72, "fgsm": 0.84, "pgd": 0.71, "gaussian": 0.80},
    "resnet56-cifar10": {"cw": 0.86, "fgsm": 0.85, "pgd": 0.80, "gaussian": 0.95},
    "densenet121-cifar10": {"cw": 0.88, "fgsm": 0.78, "pgd": 0.86, "gaussian": 0.91},
}
"""The paper's correlations of Themis, by model and perturbation."""


def paper_plan() -> EvaluationPlan:
    """The plan for the models of the paper.

    One test of CW costs 304 passes, so its budget in tests is small. It finds a wrong answer of any confidence, its
    magnitude, so that no magnitudes with other error rates can be chosen: only the paper's are used.
    """
    return EvaluationPlan.of(
        {
            "models": MODELS,
            "perturbations": ["cw", "fgsm", "pgd", "gaussian"],
            "exceptions": {
                "cw": {
                    "magnitudes": "paper",
                    "tests": 100,
                    "judge_seeds": 100,
                    "grid_seeds": 20,
                    "questions": "faults",
                },
                "pgd": {"tests": 500, "judge_seeds": 300, "grid_seeds": 100, "questions": "faults"},
                "fgsm": {"questions": "faults,done"},
                **{name: {"neurons": "channel", "seeds": 300, "judge_seeds": 300, "grid_seeds": 100} for name in LARGE},
            },
        }
    )
