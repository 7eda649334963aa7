"""Print the fault rate that a finished run would have if its theta occurred as often as in operation. Its uniform tests
are weighted; nothing is run. A profile under which they are worth fewer than 50 tests is refused.

themis rate runs/first --profile "density~beta(1,8)"
themis rate runs/first --profile weather.yaml
"""

from dataclasses import asdict

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser
from themis.text import print_json, print_text


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    text = "THETA~DISTRIBUTION, separated by commas, or a YAML file with a line THETA: DISTRIBUTION for each"
    parser.add_argument("--profile", metavar="PROFILE", required=True, help=text)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def execute(arguments: CommandLine) -> int:
    from themis.runs.analysis.operation import rate_in_operation

    rate = rate_in_operation(arguments.run, arguments.profile)
    if arguments.json:
        print_json(asdict(rate))
    else:
        print_text(str(rate))
    return DONE
