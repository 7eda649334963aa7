"""Specifications of criteria."""

import pytest

import themis
from themis import UsageError
from themis_lab.criteria import CRITERIA, PAPER, SNAC, choose_criterion

MADE = [
    *((name, {}) for name in CRITERIA),
    *((name, {"variant": variant}) for name, kind in CRITERIA.items() for variant in kind.variants),
    ("kmnc", {"k": 100, "neurons": "element"}),
    ("nc", {"threshold": 0.75, "layers": ["conv1", "fc1"]}),
    ("lsa", {"layers": "fc1", "upper": 50.0}),
    ("scc", {"neurons": "channel", "alpha": None}),
]


@pytest.mark.parametrize(("name", "options"), MADE)
def test_the_text_of_a_criterion_creates_an_equal_one(name, options):
    made = CRITERIA[name](**options)
    again = choose_criterion(str(made))
    assert type(again) is type(made)
    assert again.options() == made.options()
    assert str(CRITERIA[name]()) == name


def test_the_papers_baselines_have_its_settings():
    nc, kmnc, idc, lsa = (choose_criterion(PAPER[name]) for name in ("nc", "kmnc", "idc", "lsa"))
    assert (nc.threshold, kmnc.k, idc.m, lsa.upper) == (0.5, 1000, 12, 2000)
    assert [str(each) for each in (nc, kmnc, idc, lsa)] == ["nc", "kmnc", "idc", "lsa"]  # which are the defaults too
    assert all(type(choose_criterion(alias)) is CRITERIA[name] for alias, name in {"lsc": "lsa", "dsc": "dsa"}.items())


def test_a_list_needs_no_quotes():
    assert choose_criterion("nc(threshold=0.25, layers=[conv1, fc1])").options()["layers"] == ["conv1", "fc1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kmcn", "criterion must be a known name, got 'kmcn': did you mean 'kmnc'"),
        ("kmnc(k", "criterion must be a name, perhaps with options"),
        ("kmnc(100)", "options must be NAME=VALUE, got '100'"),
        ("kmnc(sections=100)", "kmnc: unknown option 'sections'"),
        ("kmnc(variant=deepgauge2)", "variant must be a known name, got 'deepgauge2'"),
        ("nc(neurons=pixel)", "neurons must be 'channel' or 'element', got 'pixel'"),
        ("lsa(layers=['a', 'b'])", "lsa reads one layer, got 2"),
        (3, "criterion must be a name"),
    ],
)
def test_invalid_specifications_are_rejected(text, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        choose_criterion(text)


def test_a_class_of_ones_own_needs_its_own_name(monkeypatch):
    class Hot(SNAC):
        pass

    message = "the criterion Hot must have a name of its own, but 'snac' is that of SNAC: write name = 'hot' in the"
    with pytest.raises(UsageError, match=message):
        choose_criterion(Hot())
    monkeypatch.setitem(themis.criteria.CRITERIA.own, "hot", Hot)
    with pytest.raises(UsageError, match=message):  # it would be compared as snac
        choose_criterion("hot")
    Hot.name = "hot"
    assert str(choose_criterion("hot(sigma=1.5)")) == "hot(sigma=1.5)"
    assert isinstance(choose_criterion(Hot()), Hot)
