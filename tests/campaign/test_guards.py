"""Guards at the start of a run and in `themis check`: batches that matter, and outputs that do not fit the labels."""

import warnings

import pytest
import torch
from torch import nn

import themis
from themis.campaign.preflight import check
from themis.cli.check import describe
from themis.settings import Settings


def net(n_outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, n_outputs))


DATA = torch.rand(60, 16, generator=torch.Generator().manual_seed(0))


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces another package
        return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)


class Centred(nn.Module):
    def forward(self, x):
        return x[:, :3] - x[:, :3].mean(0)


@pytest.mark.parametrize("model", [quantised, Centred], ids=["int8", "centred"])
def test_a_model_whose_answers_depend_on_the_batch_is_reported(model):
    with pytest.warns(RuntimeWarning, match="depends on the other inputs of its batch: alone, outputs differ by"):
        themis.run(model(), DATA, "gaussian", max_tests=16)
    result = check(themis.Target(model()), DATA)
    assert any("depends on the other inputs of its batch" in line for line in describe(result, Settings()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rounding_is_not_reported(dtype):
    assert themis.run(net().to(dtype), DATA, "gaussian", max_tests=16).rounds[-1].tests == 16  # no warning, no error
    result = check(themis.Target(net().to(dtype)), DATA)
    assert not any("depends on the other inputs" in line for line in describe(result, Settings()))


def test_a_model_that_refuses_a_single_input_is_tested_all_the_same():
    class Pairs(nn.Module):
        def forward(self, x):
            if len(x) == 1:
                raise ValueError("give me more")
            return x[:, :3]

    assert themis.run(Pairs(), DATA, "gaussian", max_tests=16).rounds[-1].tests == 16


def test_one_unit_for_features_of_unequal_ranges_is_reported():
    table = torch.cat([DATA[:, :8], 1000 * DATA[:, 8:]], 1)
    target = themis.Target(net(), bounds=(0, 1000))
    message = "gaussian changes all features of the table by a share of one range, 0 to 1000, but 8 of 16 features"
    with pytest.warns(RuntimeWarning, match=message):
        themis.run(target, table, "gaussian", max_tests=16)
    assert sum(message in line for line in describe(check(target, table), Settings())) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        themis.run(target, table, "table_noise", max_tests=16)
        themis.run(target, 1000 * DATA, "gaussian", max_tests=16)
        themis.run(net(), torch.cat([DATA[:, :8] / 100, DATA[:, 8:]], 1), "gaussian", max_tests=16)


def test_bytes_normalised_by_the_statistics_of_shares_are_reported():
    module = nn.Sequential(nn.Flatten(), net())
    pictures = (255 * DATA).round().view(-1, 1, 4, 4)

    def target(mean, std, bounds=(0, 255)):
        return themis.Target(module, bounds=bounds, preprocess=themis.Normalize(mean, std))

    message = "but --mean 0.1307 --std 0.3081 is that of inputs in 0..1: pass --mean 33.33 --std 78.57, or divide"
    with pytest.warns(RuntimeWarning, match=message):
        themis.run(target(0.1307, 0.3081), pictures, "gaussian", max_tests=16)
    assert sum(message in line for line in describe(check(target(0.1307, 0.3081), pictures), Settings())) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        themis.run(target(33.33, 78.57), pictures, "gaussian", max_tests=16)
        themis.run(target(0, 255), pictures, "gaussian", max_tests=16)
        themis.run(target(0, 1), pictures, "gaussian", max_tests=16)  # the model scales them itself
        themis.run(target(0.1307, 0.3081, (0, 1)), pictures / 255, "gaussian", max_tests=16)


def test_outputs_that_do_not_fit_the_labels_are_reported():
    labels = torch.arange(60) % 10
    finding = "the clean answers are no better than always naming class"
    with pytest.warns(RuntimeWarning, match=finding):
        themis.run(net(64), (DATA, labels), "gaussian", max_tests=16)
    result = check(themis.Target(net(64)), (DATA, labels))
    assert sum(finding in line for line in describe(result, Settings())) == 1


def test_the_guards_count_their_passes():
    seen = []

    def predict(inputs):
        seen.append(len(inputs))
        return inputs[:, :3]

    result = themis.run(themis.BlackBox(predict), DATA, "gaussian", max_tests=16)
    assert sum(seen) == result.rounds[-1].passes
