"""Tables as Markdown."""

from themis.report.table import Table


def test_numbers_are_aligned_right_and_words_left():
    rows = [("nc", "3", "-", "<1%", "holds", "4 of 5 cells, in which the error rates differ enough", "")]
    rows += [("lsa", "not reached", "-", "2%", "does not hold", "none", "")]
    table = Table("Found", ("technique", "tests", "r", "rate", "verdict", "why", "note"), rows, [])
    assert table.markdown().splitlines()[3] == "| --- | ---: | ---: | ---: | --- | --- | ---: |"
    assert "| --- | ---: |" in Table("Nothing yet", ("technique", "tests"), [], []).markdown()
