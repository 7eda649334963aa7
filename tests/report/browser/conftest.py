"""Reports of real campaigns, each created once."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def digits_run(trained, tmp_path_factory):
    """The folder of a campaign on LeNet-5 and the digits it has not seen, as `themis demo` runs it."""
    import themis
    from themis.runs.source import Origin

    net, held_out = trained
    out = tmp_path_factory.mktemp("digits") / "run"
    origin = Origin(model="themis_lab.cli.demo:make_model", data="themis_lab.cli.demo:make_data")
    themis.run(net, held_out, "gaussian + rotate", magnitude=1.5, max_tests=6000, out=out, origin=origin)
    return out


@pytest.fixture(scope="session")
def digits_report(digits_run):
    from themis.report.page import write_report

    return write_report(digits_run)


MARKUP = "<img src=x onerror=window.hacked=1>"


class Labelled(torch.nn.Module):
    """A net whose layers have markup for names."""

    def __init__(self):
        super().__init__()
        self.add_module("<b>bold<b>", torch.nn.ReLU())
        self.last = torch.nn.Linear(192, 3)

    def forward(self, x):
        return self.last(getattr(self, "<b>bold<b>")(x).flatten(1))


@pytest.fixture
def markup():
    """Markup that runs a script unless it is shown as text."""
    return MARKUP


@pytest.fixture(scope="session")
def markup_report(tmp_path_factory):
    """The report of a run whose classes, files, folder and layers have markup for names."""
    from PIL import Image

    import themis
    from themis.data.readers import read_data
    from themis.report.page import write_report
    from themis.runs.source import Origin

    home = tmp_path_factory.mktemp("markup")
    rng = torch.Generator().manual_seed(0)
    for k, name in enumerate((MARKUP, "<script>window.hacked=1", "\"'&amp; plain")):
        folder = home / "pictures" / name
        folder.mkdir(parents=True)
        for n in range(12):
            pixels = torch.rand(8, 8, 3, generator=rng)
            pixels[..., k] = 0.6 * pixels[..., k] + 0.4
            Image.fromarray((pixels * 255).byte().numpy()).save(folder / f"<i>{n}.png")
    seeds = read_data(f"images:{home / 'pictures'}")
    torch.manual_seed(0)
    net = Labelled()
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-2)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(seeds.take(torch.arange(36))), seeds.labels).backward()
        optimiser.step()
    origin = Origin(model=f"{MARKUP}:make", data="images:pictures", folder=str(home))
    out = home / "a<" / f"script>{MARKUP}"  # the path has a closing tag in it
    Path(out).parent.mkdir()
    themis.run(net, seeds, "gaussian", magnitude=0.6, max_tests=1500, out=out, origin=origin)
    return write_report(out)


@pytest.fixture(scope="session")
def large_run(trained, tmp_path_factory):
    """A campaign that found more than 10,000 faults."""
    import themis

    net, held_out = trained
    out = tmp_path_factory.mktemp("large") / "run"
    run = themis.run(
        net, held_out, "gaussian", magnitude=1.0, policy="corners", coverage=None, max_tests=20_000, out=out
    )
    assert len(run.faults) >= 10_000
    return out
