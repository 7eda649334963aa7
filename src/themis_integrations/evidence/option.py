"""New folder for evidence that an auditor can check: a model card, an ML-BOM, a statement to sign, the page."""

from shlex import quote


def write(run: str, folder: str, *, most_pictures: int) -> str:
    """Write the evidence, and return what to print."""
    from themis_integrations.evidence.evidence import write_evidence

    path = write_evidence(run, folder, most_pictures=most_pictures)
    return f"Evidence: {path} (to check it: themis verify {quote(str(path))})"
