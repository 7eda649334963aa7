"""A tiny classifier, pictures that it answers correctly but for some, and a small suite over them."""

import torch

import themis


def classifier(version=0):
    """A net; other versions have slightly other weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4))
    torch.manual_seed(version)
    with torch.no_grad():
        for weight in net.parameters() if version else ():
            weight += 0.008 * torch.randn_like(weight)
    return net.eval()


def pictures(net, n=120):
    """Inputs in 0..1 and labels, every tenth of which is wrong."""
    torch.manual_seed(1)
    inputs = torch.rand(n, 1, 8, 8)
    labels = net(inputs).argmax(1)
    labels[::10] = (labels[::10] + 1) % 4
    return inputs, labels


MEMBERS = [
    {"perturb": "gaussian", "magnitude": 0.4, "levels": [{"sigma": 0.1}, {"sigma": 0.4}]},
    {"perturb": "fog", "levels": [{"density": 1.8, "patchiness": 0.3, "scale": 0.5}]},
    {"perturb": "brightness"},
]


def small_suite(out, *, members=MEMBERS, version=0, **options):
    net = classifier(version)
    options = {"max_tests": 600, **options}
    return themis.run_suite(net, pictures(classifier()), {"members": members}, out=out, **options)
