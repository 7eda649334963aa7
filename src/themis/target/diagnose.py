"""Diagnosis of common silent mistakes, for a classifier that is correct no more often than by chance.

If inputs are scaled or normalised differently than the model expects, or channels or labels are in another order,
nothing raises, and the campaign tests a model that is broken from the start. Each suspicion is tested on the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import warn
from themis.target.target import AnyTarget, Normalize, Target
from themis.target.traits import own_statistics

IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
MIN_GAIN = 0.2
"""A suspicion is reported if correcting it raises the accuracy by this much, and to at least one half."""
MIN_ADVANTAGE = 0.1
"""A suspicion is not reported if correcting another one raises the accuracy by this much more."""

N_NORMALISED_INPUTS = 128
"""Clean inputs that `warn_of_missing_normalisation` runs."""


@dataclass(frozen=True)
class Suspicion:
    """A possible mistake, its remedy, and the accuracy once it is corrected."""

    what: str
    remedy: str
    accuracy: float


def is_near_chance(n_right: int, n: int, n_classes: int) -> bool:
    """Return whether random answers are at least this accurate with a probability above 0.001."""
    from scipy.special import bdtrc

    return n > 0 and n_classes > 1 and bool(n_right < 1 or bdtrc(n_right - 1, n, 1 / n_classes) > 1e-3)


def warn_of_changes(target: AnyTarget) -> None:
    """Warn if forward passes have changed parameters or buffers of the open target."""
    names = target.changed_tensors() if isinstance(target, Target) else []
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warn(
            f"the model changes its own {names[0]}{more} in forward passes, although it is in evaluation mode: its "
            "answers may depend on the inputs that came before, and replays may differ. It is restored after the "
            "campaign: change such tensors only if self.training"
        )


def warn_of_normalisation(target: AnyTarget, shape: Sequence[int]) -> None:
    """Warn if pictures or signals in 0..255 are normalised by the mean and standard deviation for inputs in 0..1.

    Such a model may still answer most clean inputs correctly, but its activations are hundreds of times too large.
    """
    norm, (low, high) = getattr(target, "preprocess", None), target.bounds
    if not isinstance(norm, Normalize) or len(shape) < 2 or high - low < 100:
        return
    if bool(((norm.mean >= 0) & (norm.mean <= 1)).all() and (norm.std < 1).all()):
        right = Normalize.within(target.bounds, norm.mean.tolist(), norm.std.tolist())
        warn(
            f"the normalisation must fit the bounds {low:g},{high:g}, but {_as_options(norm)} is that of inputs in "
            f"0..1: pass {_as_options(right)}, or divide the inputs by {high:g} and pass bounds 0,1"
        )


def _as_options(norm: Normalize) -> str:
    """A normalisation as the options of a command."""
    mean, std = (",".join(f"{number:.4g}" for number in values.tolist()) for values in (norm.mean, norm.std))
    return f"--mean {mean} --std {std}"


def warn_of_missing_normalisation(
    target: AnyTarget, seeds: Seeds, outputs: Tensor, labels: Tensor | None, chunk: int
) -> int:
    """Warn if an open classifier answers better with the normalisation in its configuration, or if this is unknown.

    A fine-tuned model may still have the configuration of the original model, so the normalisation is not applied
    automatically. outputs, labels: those of all seeds. Returns the number of inputs that were run.
    """
    if not isinstance(target, Target) or target.preprocess is not None or target.bounds not in ((0, 1), (0, 255)):
        return 0
    statistics, n_channels = own_statistics(target.module, is_local=True), seeds.shape[1]
    fits = statistics is not None and all(len(values) in (1, n_channels) for values in statistics)
    if statistics is None or not fits or len(seeds.shape) != 4 or seeds.others is not None:
        return 0
    norm = Normalize.within(target.bounds, *statistics)
    low, high = target.bounds
    python = "themis.Normalize.of(model)" if high == 1 else f"themis.Normalize.of(model, ({low:g}, {high:g}))"
    finding = f"the configuration of {type(target.module).__name__} names a normalisation, which is not applied"
    remedy = f"pass preprocess={python} ({_as_options(norm)})"
    if labels is None or labels.ndim != 1 or labels.is_floating_point() or outputs.ndim != 2:
        finding += ", and without labels of classes Themis cannot tell whether the model needs it"
        warn(f"{finding}: {remedy}, or preprocess=themis.Normalize(0, 1) (--mean 0 --std 1) if it does not")
        return 0
    normalised, n = replace(target, preprocess=norm), min(len(seeds), N_NORMALISED_INPUTS)
    with torch.no_grad():
        parts = torch.split(seeds.take(torch.arange(n)), chunk)
        scores = torch.cat([normalised.forward(part.to(outputs.device)) for part in parts])
    was, now = outputs[:n].argmax(1) == labels[:n], scores.argmax(1) == labels[:n]
    n_gained, n_lost = int((now & ~was).sum()), int((was & ~now).sum())
    from scipy.stats import binom  # takes long to import

    if binom.sf(n_gained - 1, n_gained + n_lost, 0.5) < 0.01:  # the gains are hardly due to chance
        before, after = (f"{float(right.double().mean()):.1%}" for right in (was, now))
        finding += f": with it, the model answers {after} of {n} clean inputs correctly instead of {before}"
        warn(f"{finding}; {remedy}")
    return n


def warn_of_unequal_ranges(name: str, inputs: Tensor, bounds: tuple[float, float]) -> None:
    """Warn of a perturbation with one unit for all features of a table `[rows, features]` whose ranges differ a lot.

    Tables scaled to 0..1 or -1..1 are assumed to have one unit.
    """
    low, high = bounds
    if inputs.ndim != 2 or bounds in ((0, 1), (-1, 1)):
        return
    sizes = inputs.amax(0) - inputs.amin(0)
    n_varying, n_small = int((sizes > 0).sum()), int(((sizes > 0) & (sizes < (high - low) / 10)).sum())
    if n_small and 4 * n_small >= n_varying:
        warn(
            f"{name} changes all features of the table by a share of one range, {low:g} to {high:g}, but {n_small} of "
            f"{n_varying} features vary by less than a tenth of it: use table_noise, edit or edit_worst, whose unit is "
            "the range of each feature"
        )


def suspect(target: AnyTarget, inputs: Tensor, labels: Tensor) -> list[Suspicion]:
    """Return the mistakes whose correction makes a classifier more accurate, best first; the target must be open."""
    with torch.no_grad():
        outputs = target.forward(inputs.to(target.device)).cpu()
        if outputs.ndim != 2 or labels.ndim != 1 or outputs.shape[1] <= int(labels.max()):
            return []
        accuracy = _accuracy(outputs, labels)
        suspicions = list(_suspect_labels(outputs, labels))
        for what, remedy, change in _changes(inputs, target):
            try:
                answers = target.forward(change(inputs).to(target.device)).cpu()
            except Exception:  # a change that the model does not accept is not the mistake
                continue
            suspicions.append(Suspicion(what, remedy, _accuracy(answers, labels)))
    best = max((suspicion.accuracy for suspicion in suspicions), default=0.0)
    least = max(0.5, accuracy + MIN_GAIN, best - MIN_ADVANTAGE)
    likely = [suspicion for suspicion in suspicions if suspicion.accuracy >= least]
    return sorted(likely, key=lambda suspicion: -suspicion.accuracy)


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


def _changes(inputs: Tensor, target: AnyTarget) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Yield possible mistakes in the inputs, each with its remedy and a function that corrects it."""
    low, high = target.bounds
    if high <= 1:
        yield "the model expects inputs in 0..255", "multiply them by 255 and pass bounds 0,255", lambda x: x * 255
    if high > 1:
        yield "the model expects inputs in 0..1", "divide them by 255 and pass bounds 0,1", lambda x: x / 255
    if low >= 0:
        middle, half = (low + high) / 2, (high - low) / 2
        yield (
            "the model expects inputs in -1..1",
            f"pass the normalisation: mean {middle:g}, std {half:g}",
            lambda x: (x - middle) / half,
        )
    is_rgb = inputs.ndim == 4 and inputs.shape[1] == 3
    if is_rgb:
        yield "the channels are in reverse order (BGR instead of RGB)", "reverse them in the data", lambda x: x.flip(1)
    if is_rgb and getattr(target, "preprocess", None) is None:
        for name, (mean, std) in {"ImageNet": IMAGENET_STATISTICS, "CIFAR-10": CIFAR_STATISTICS}.items():
            norm = Normalize.within(target.bounds, mean, std)
            yield f"the model expects inputs normalised as for {name}", f"pass {_as_options(norm)}", norm
    if inputs.ndim == 4 and inputs.shape[2] == inputs.shape[3]:
        yield "rows and columns are swapped", "transpose the images in the data", lambda x: x.transpose(2, 3)
    if inputs.ndim == 4:
        yield "the images are negatives", "invert them in the data", lambda x: low + high - x


def _suspect_labels(outputs: Tensor, labels: Tensor) -> Iterator[Suspicion]:
    """Yield a suspicion if a one-to-one mapping of labels explains the answers, given enough labels to tell."""
    from scipy.optimize import linear_sum_assignment

    n_classes = outputs.shape[1]
    if len(labels) < 5 * n_classes:
        return
    table = np.zeros((n_classes, n_classes), dtype=np.int64)
    np.add.at(table, (labels.numpy(), outputs.argmax(1).numpy()), 1)
    rows, answers = linear_sum_assignment(-table)
    moved = [(int(label), int(answer)) for label, answer in zip(rows, answers, strict=True) if label != answer]
    if moved:
        label, answer = max(moved, key=lambda pair: table[pair])
        order = rows[np.argsort(answers)]  # the label that each answer stands for
        yield Suspicion(
            f"the labels are in another order: the model says {answer} where the label is {label}",
            f"pass the label of each output: --label-order {','.join(map(str, order))}",
            float(table[rows, answers].sum() / len(labels)),
        )
