"""What a campaign has shown, in one sentence."""

from __future__ import annotations

from typing import Any

from themis.runs.run import percent


def verdict(view: dict[str, Any]) -> dict[str, str]:
    """The sentence, and how it stands: broken, standing or open."""
    counts, rate = view["counts"], view["fault_rate"]
    what, so_far = view["perturbation"], "So far, " if view["state"] == "running" else ""
    if not counts["tests"] and not counts["faults"]:
        said = "No test has been counted yet." if so_far else "No test was counted."
        return {"tone": "open", "text": said}
    if counts["faults"]:
        text = (
            f"{'under' if so_far else 'Under'} {what} the model breaks: {counts['distinct_faults']:,} distinct fault"
            f"{'s' * (counts['distinct_faults'] != 1)} on {counts['failing_seeds']:,} of {counts['seeds']:,} seeds in "
            f"{counts['tests']:,} tests"
        )
        if rate is not None:
            text += f"; {_share(rate)} of random disturbances break it"
        return {"tone": "broken", "text": f"{so_far}{text}."}
    if counts["tests"] == counts.get("dropped", 0):
        said = f"All {counts['tests']:,} tests were dropped for being another picture: lower min_ssim or the magnitude."
        return {"tone": "open", "text": said}
    text = f"{'no' if so_far else 'No'} fault in {counts['tests']:,} tests on {counts['seeds']:,} seeds under {what}"
    if rate is not None:
        text += f"; of random disturbances at most {percent(rate['high'], 2)} break the model, with 95% confidence"
    return {"tone": "standing", "text": f"{so_far}{text}."}


def _share(estimate: dict[str, float]) -> str:
    low, high = percent(estimate["low"], 2), percent(estimate["high"], 2)
    return f"{percent(estimate['value'], 2)} (95%: {low} to {high})"
