"""Print the share of the tests of a run that broke the model.

themis seas runs/first
"""


def add_arguments(parser):
    parser.add_argument("run", metavar="RUN", help="folder of the run")


def execute(arguments):
    import themis
    from themis.text import print_text

    run = themis.open_run(arguments.run)
    print_text(f"{len(run.faults) / run.rounds[-1].tests:.1%} of the tests broke the model")
    return 0
