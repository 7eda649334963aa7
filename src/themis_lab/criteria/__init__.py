"""Test criteria of the literature, which measure how much of a model a set of tests has covered."""

from themis.criteria import Laws, choose_criterion
from themis_lab.criteria.boundary import NBC, SNAC
from themis_lab.criteria.cc import CC
from themis_lab.criteria.configurations import DeepPath, NeuronPairs
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.idc import IDC
from themis_lab.criteria.kmnc import KMNC
from themis_lab.criteria.mcdc import MCDC
from themis_lab.criteria.nc import NC
from themis_lab.criteria.nlc import NLC
from themis_lab.criteria.npc import NPC, contributions
from themis_lab.criteria.ranking import apfd, rank
from themis_lab.criteria.readings import Batch, Layout, Readings
from themis_lab.criteria.relevances import Relevance, relevance
from themis_lab.criteria.scc import SCC
from themis_lab.criteria.surprise import DSA, LSA, MDSA
from themis_lab.criteria.topk import TKNC, TKNP
from themis_lab.criteria.tway import TWay
from themis_lab.criteria.view import activations, fit_to

ALL_CRITERIA: tuple[type[Criterion], ...] = (
    *(NC, KMNC, NBC, SNAC, TKNC, TKNP),
    *(IDC, LSA, DSA, MDSA),
    *(NLC, CC, SCC),
    *(NPC, MCDC, TWay, DeepPath, NeuronPairs),
)
CRITERIA: dict[str, type[Criterion]] = {kind.name: kind for kind in ALL_CRITERIA}
"""The criteria of the laboratory by name; `pyproject.toml` registers each as an entry point."""
PAPER = {"nc": "nc(threshold=0.5)", "kmnc": "kmnc(k=1000)", "idc": "idc(m=12)", "lsa": "lsa(upper=2000)"}
"""The baselines of the paper with its settings."""

__all__ = [
    "CC",
    "CRITERIA",
    "DSA",
    "IDC",
    "KMNC",
    "LSA",
    "MCDC",
    "MDSA",
    "NBC",
    "NC",
    "NLC",
    "NPC",
    "PAPER",
    "SCC",
    "SNAC",
    "TKNC",
    "TKNP",
    "Batch",
    "Criterion",
    "DeepPath",
    "Laws",
    "Layout",
    "NeuronPairs",
    "Readings",
    "Relevance",
    "TWay",
    "activations",
    "apfd",
    "choose_criterion",
    "contributions",
    "fit_to",
    "rank",
    "relevance",
]
