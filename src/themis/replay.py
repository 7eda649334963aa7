"""Running a fault again, from its four numbers."""

from __future__ import annotations

import numpy as np

from themis.data.seeds import Seeds
from themis.faults import Fault, Replay
from themis.measure.calculator import Calculator
from themis.measure.tests import Tests
from themis.oracle import confidence


def replay_fault(fault: Fault, *, calculator: Calculator, seeds: Seeds) -> Replay:
    """Run a fault again at its row of a chunk of the recorded shape: the same kernels, so the same bits."""
    row = int((seeds.seed_id == fault.seed_id).nonzero()[0])
    theta = np.array([list(fault.theta.values())], dtype=np.float32)
    one = Tests(np.array([fault.id]), np.array([row]), theta, np.array([fault.noise_seed]), np.array([fault.kind]))
    with calculator.target.opened():
        inputs, outputs = calculator.run_chunk(one[np.zeros(calculator.chunk, dtype=np.int64)])
    at = slice(fault.position, fault.position + 1)
    labels = None if calculator.labels is None else calculator.labels[row : row + 1]
    verdict = calculator.oracle.compare(calculator.clean_outputs[row : row + 1], outputs[at], labels)
    answer, sure = int(verdict.outcome[0]), float(confidence(outputs[at], calculator.gives_probabilities)[0])
    is_same = answer == fault.answer and bool(np.isclose(sure, fault.confidence, atol=1e-5, equal_nan=True))
    return Replay(
        clean_inputs=seeds.inputs[row],
        inputs=inputs[fault.position].cpu(),
        outputs=outputs[fault.position].cpu(),
        answer=answer,
        confidence=sure,
        is_fault=bool(verdict.is_fault[0]),
        is_same=is_same,
    )
