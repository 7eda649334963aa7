"""Check that a folder of evidence is as it was written, by `themis report RUN --evidence FOLDER`. Each file that was
changed, removed or added since is named, and the exit code is then 1. Only a signature of its statement.json can show
who wrote the folder.

themis verify evidence/first
themis verify evidence/first && cosign verify-blob --bundle first.sigstore.json evidence/first/statement.json
"""

from themis.cli import DONE, GATE_FAILED
from themis.cli.options import CommandLine, Parser
from themis.text import print_text


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of the evidence")


def execute(arguments: CommandLine) -> int:
    from themis_integrations.evidence.statement import verify_evidence

    changes = verify_evidence(arguments.folder)
    for name, change in changes.items():
        print_text(f"{change:<8} {name}")
    if changes:
        differ = "1 file differs" if len(changes) == 1 else f"{len(changes):,} files differ"
        print_text(f"{arguments.folder} is not as it was written: {differ}")
        return GATE_FAILED
    print_text(f"{arguments.folder} is as it was written")
    return DONE
