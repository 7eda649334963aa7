"""Mark faults as valid or invalid tests, in the browser. A random sample of the faults of the uniform stream is shown
one by one, the disturbed picture beside the clean one. The keys v, i and ? mark a fault as a valid test, an invalid one
(no person could give the right answer either) or unsure; u undoes. Marks are stored in the run folder at once, as
reviews.jsonl. The rate of valid faults follows from them: see --results, the report and `themis gate
--max-valid-fault-rate`. The page is served only to this machine, at a secret address.

themis review runs/first
themis review runs/first --reviewer ann --sample 200
themis review runs/first --results
"""

import getpass
from contextlib import closing

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import REPLAY_OPTIONS, add_overrides, rebuild
from themis.runs.store.reader import Reader
from themis.text import print_json, print_text
from themis_integrations.browser.watch import run_server


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    review = parser.add_argument_group("review")
    add_option(review, "reviewer", str | None, None, "name that marks are stored with; by default that of the user")
    add_option(review, "sample", int, 100, "faults to show, drawn at random; the same ones for every reviewer")
    review.add_argument("--results", action="store_true", help="print what the marks say, without a server")
    review.add_argument("--json", action="store_true", help="print only the results, as JSON, without a server")
    server = parser.add_argument_group("server")
    add_option(server, "port", int, 0, "port to listen on, at 127.0.0.1; 0 chooses a free one")
    server.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    add_overrides(parser, REPLAY_OPTIONS)


def execute(arguments: CommandLine) -> int:
    from themis.runs.analysis.review import read_review

    if not arguments.results and not arguments.json:
        _serve(arguments)
    result = read_review(arguments.run)
    if arguments.json:
        print_json(None if result is None else result.as_dict())
    else:
        print_text("No fault is marked." if result is None else str(result))
    return DONE


def _serve(arguments: CommandLine) -> None:
    """Serve the page until Ctrl-C, which is how a review ends."""
    from themis_integrations.browser.marking import Session, serve_review

    with closing(Reader(arguments.run)) as run:
        replayer = rebuild(run, arguments.given)
        session = Session(replayer, arguments.reviewer or getpass.getuser(), arguments.sample)
    with serve_review(session, port=arguments.port) as server:
        try:
            run_server(server, f"the review of {arguments.run}", opens_browser=not arguments.no_browser)
        except KeyboardInterrupt:
            session.end()
            print_text()
