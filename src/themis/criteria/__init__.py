"""Test criteria: how much of a model a set of tests has covered, as defined in the literature."""

from themis.criteria.boundary import NBC, SNAC
from themis.criteria.cc import CC
from themis.criteria.configurations import DeepPath, NeuronPairs
from themis.criteria.criterion import Criterion, Laws
from themis.criteria.fitting import activations, fit_to
from themis.criteria.idc import IDC
from themis.criteria.kmnc import KMNC
from themis.criteria.mcdc import MCDC
from themis.criteria.names import CRITERIA, PAPER, choose_criterion
from themis.criteria.nc import NC
from themis.criteria.nlc import NLC
from themis.criteria.npc import NPC, contributions
from themis.criteria.ranking import apfd, rank
from themis.criteria.readings import Batch, Layout, Readings
from themis.criteria.relevances import Relevance, relevance
from themis.criteria.scc import SCC
from themis.criteria.surprise import DSA, LSA, MDSA
from themis.criteria.topk import TKNC, TKNP
from themis.criteria.tway import TWay

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
