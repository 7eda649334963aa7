"""Models and data of other packages, with the real packages where they are installed."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.runs.source import Origin
from themis.target.loaders import load_weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages warn of many things

PICTURES = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def installed(name):
    """The package, unless it is missing or does not fit the installed torch."""
    try:
        return pytest.importorskip(name)
    except RuntimeError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def test_timm_names_its_normalisation(tmp_path, monkeypatch):
    installed("timm")
    monkeypatch.chdir(tmp_path)
    name = "timm:resnet10t(pretrained=False, num_classes=4)"
    np.savez("pictures.npz", inputs=PICTURES.numpy())
    origin = Origin(model=name, data="npz:pictures.npz")
    target = origin.target()
    mean, std = (torch.tensor(target.module.pretrained_cfg[key]) for key in ("mean", "std"))
    assert torch.equal(target.preprocess.mean, mean)
    assert torch.equal(target.preprocess.std, std)
    assert repr(themis.Normalize.of(target.module)) == repr(target.preprocess)
    wide = Origin(model=name, bounds=(0.0, 255.0)).target().preprocess
    assert torch.allclose(wide(255 * PICTURES), target.preprocess(PICTURES), atol=1e-5)
    themis.run(target, origin.read(), "gaussian", origin=origin, out="run", max_tests=16)
    recorded = themis.runs.store.Reader("run").record["origin"]
    assert recorded["mean"] == pytest.approx(mean.tolist())
    own = Origin(model=name, mean=[0.5], std=[0.5]).target().preprocess
    assert own.mean.tolist() == [0.5]


def test_transformers_names_its_normalisation(tmp_path):
    transformers = installed("transformers")
    installed("torchvision")  # which its models of pictures import
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(
        tmp_path / "vit"
    )
    target = Origin(model=f"hf:{tmp_path / 'vit'}").target()
    assert target.preprocess.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    result = themis.run(target, PICTURES, "gaussian", max_tests=16)
    assert result.start.entry == "entry 'logits' of what the model returns"


def test_a_checkpoint_of_lightning_is_loaded_into_the_model_itself(tmp_path):
    lightning = installed("pytorch_lightning")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, batch, k):
            inputs, labels = batch
            return self.loss(self.model(inputs), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    training = Training()
    data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.arange(8) % 3)
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(training, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    net = nn.Linear(4, 3)
    with pytest.warns(RuntimeWarning, match="removed 'model.' from the names, and left out 1 weights"):
        load_weights(net, tmp_path / "last.ckpt")
    assert torch.equal(net.weight, training.model.weight)
