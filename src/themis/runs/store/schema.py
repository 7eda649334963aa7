"""The schema of a run folder: the tables of `run.sqlite`, and the form of every value that is read from the folder.

SQLite keeps the comments inside statements, and its command `.schema` shows them. A folder may have been damaged,
edited or made by someone else, so every value is checked; a `StoreError` names the file, the value and the remedy.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from themis.errors import StoreError, UsageError
from themis.reading import (
    Form,
    all_of,
    anything,
    check_form,
    either,
    flag,
    items,
    number,
    one_of,
    optional,
    parse_json,
    record,
    text,
    values_of,
    whole,
)
from themis.runs.fault import COLUMNS, MAX_CHUNK, MAX_REAL, MAX_TESTS, PLAIN_COLUMNS, Column
from themis.settings import VERDICTS, Settings

DATABASE = "run.sqlite"
RESTORE_REMEDY = "restore the run folder from a copy"
PARTS_FILE = "parts.safetensors"
"""The file with the part of each seed, if the seeds were split."""
SCHEMA_VERSION = 4
"""Version of the tables, stored as SQLite's user_version; increase it with every change."""
SIGNATURE_UNITS = 10_000
"""Signatures store shares as integers in units of 1/SIGNATURE_UNITS, which is three times as fast as writing floats."""
APPLICATION_ID = 0x7E315
"""Stored as SQLite's application_id, to distinguish a run from any other database."""

THETA_PREFIX = "theta_"
"""Prefix of the columns for the dimensions of theta."""
TENSORS_COLUMN = Column("tensors", "str", True, "file in tensors/ with its input and output; none if not kept")
"""The last column of a fault in the database."""

_TABLES = """
CREATE TABLE run (           -- the record of the campaign; written once
  name TEXT PRIMARY KEY,     -- settings, origin, start, samples, environment, parts, tag (signs what names code)
  value TEXT NOT NULL        -- JSON
) WITHOUT ROWID;

CREATE TABLE rounds (        -- one row per round; counts are totals since the start
{rounds}
);

CREATE TABLE faults (        -- one row per fault: a test that the model failed
{faults}
);

CREATE INDEX faults_by_outcome ON faults (seed_id, answer);

CREATE TABLE checkpoint (    -- one row: where a resumed campaign continues
  one INTEGER PRIMARY KEY CHECK (one = 1),
  tests INTEGER NOT NULL,    -- tests done; faults with larger numbers will be found again
  rounds INTEGER NOT NULL,   -- completed rounds
  file TEXT NOT NULL         -- its arrays, in state/
);

CREATE VIEW distinct_faults AS  -- per seed and wrong outcome, the fault with the smallest change
  SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place FROM faults)
  WHERE place = 1;
"""


def create(database: sqlite3.Connection, theta: Sequence[tuple[str, str]]) -> None:
    """Create the tables; `theta` has the name of each dimension and a comment."""
    rounds = _define([(f"{column.name} {column.sql_type}", column.help) for column in ROUND_COLUMNS])
    tables = _TABLES.format(rounds=rounds, faults=_define([*_fault_columns(theta)]))
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(
        f"BEGIN; {tables} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _define(columns: Sequence[tuple[str, str]]) -> str:
    """The definitions of the columns of a table, each with its comment."""
    commas = [","] * (len(columns) - 1) + [""]
    lines = zip(columns, commas, strict=True)
    return "\n".join(f"  {definition + comma:<26}  -- {comment}" for (definition, comment), comma in lines)


def _fault_columns(theta: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The definition and the comment of each column of the table `faults`."""
    for column in COLUMNS:
        if column.name == "theta":
            yield from ((f"{theta_column(name)} REAL NOT NULL", comment) for name, comment in theta)
        else:
            null = "" if column.missing is not None else " PRIMARY KEY" if column.name == "id" else " NOT NULL"
            yield f"{column.name} {column.sql_type}{null}", column.text
    yield f"{TENSORS_COLUMN.name} TEXT", TENSORS_COLUMN.text


def check(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not a run, or has another schema."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(f"{path} must be a run of Themis, but it is a different database: check the path")
    if version != SCHEMA_VERSION:
        why = "an older Themis wrote it; run the campaign again"
        if version > SCHEMA_VERSION:
            why = "a newer Themis wrote it; upgrade Themis"
        raise StoreError(f"{path} must have schema {SCHEMA_VERSION}, but it has {version}: {why}")


def check_tables(database: sqlite3.Connection, path: Path) -> tuple[str, ...]:
    """Refuse a database whose schema is not exactly that of a run, comments aside; return the names of its theta.

    Call it before reading any row: a view in place of a table could run an endless query, and a trigger could change
    what a resumed campaign writes.
    """
    columns = [name for _, name, *_ in database.execute("PRAGMA table_info(faults)")]
    theta = tuple(name.removeprefix(THETA_PREFIX) for name in columns if name.startswith(THETA_PREFIX))
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as ours:
        create(ours, [(name, "") for name in theta])
        expected = _statements(ours)
    actual = _statements(database)
    for kind, name in expected | actual:
        statements = expected.get((kind, name)), actual.get((kind, name))
        if statements[0] != statements[1]:
            problem = "was added" if statements[0] is None else "is missing" if statements[1] is None else "was changed"
            raise StoreError(
                f"{path / DATABASE} must have the tables of a run of Themis, but its {kind} {name[:60]!r} {problem}: "
                f"{RESTORE_REMEDY}"
            )
    return theta


def _statements(database: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """The statement of each table, index, view and trigger, without comments and with single spaces."""
    rows = database.execute("SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite@_%' ESCAPE '@'")
    return {(str(kind), str(name)): _without_comments(str(sql)) for kind, name, sql in rows}


def _without_comments(statement: str) -> str:
    tokens = re.finditer(r'("(?:[^"]|"")*"|\'(?:[^\']|\'\')*\')|--[^\n]*|\s+|([^-\s"\',]+|.)', statement)
    return " ".join(token[1] or token[2] for token in tokens if token[1] or token[2])


def config(record: dict[str, Any]) -> dict[str, Any]:
    """The content of `config.yaml`: the options of a run as `themis run --config` reads them."""
    return {**(record["origin"] or {}), "perturb": record["perturbation"], **record["settings"]}


def read_signature(text: str) -> list[float]:
    """The shares of the layers from a stored signature."""
    return [share / SIGNATURE_UNITS for share in json.loads(text)]


def theta_column(name: str) -> str:
    """The quoted column name of a dimension of theta."""
    return quoted(THETA_PREFIX + name)


def quoted(name: str) -> str:
    """The name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


MAX_JSON = 16 << 20
"""Largest size of a JSON file in a run folder, in bytes."""
STATE_FILE = r"\d{9,}-\d{6,}-[0-9a-f]{8}\.safetensors"
NAME_FORM = text(1000)
SHARE_FORM = number(0, 1)
COUNT_FORM = whole(0, MAX_TESTS * 100)
TESTS_FORM = whole(0, MAX_TESTS)
HASH_FORM = text(200)
STOP_REASONS = ("coverage", "found", "decided", "tests", "seeds", "passes", "seconds", "plateau", "user", "error")


@contextmanager
def damage_explained(path: Path) -> Iterator[None]:
    """Turn the ValueError of a check into an error that names the file and the remedy."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise StoreError(f"{path} is damaged: {error}; {RESTORE_REMEDY}") from error


def parse_record(rows: Sequence[tuple[Any, Any]], path: Path) -> dict[str, Any]:
    """The record of a run from the rows of its table `run`."""
    values: dict[str, Any] = {}
    for name, value in rows:
        with damage_explained(path):
            check_form(name, NAME_FORM, "a name in the table run")
            check_form(value, text(MAX_JSON), f"the value of {name!r} in the table run")
            try:
                values[name] = parse_json(value)
            except ValueError as error:
                raise ValueError(f"{name!r} in the table run must be JSON, {error}") from error
    with damage_explained(path):
        check_form(values, RECORD_FORM, "the table run")
        if "start" in values:
            _check_layers(values["start"])
    return values


def _settings(value: Any, place: str) -> None:
    """Check the settings of a campaign, by the rules of `Settings`."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object with names and values")
    known = {field.name: str(field.type) for field in fields(Settings)}
    for name, setting in value.items():
        if name not in known:
            raise ValueError(f"{place}.{name} must be a setting that this version of Themis has")
        if not known[name].startswith(("int", "float", "list")):
            (optional(NAME_FORM) if known[name].endswith("None") else NAME_FORM)(setting, f"{place}.{name}")
    for name in ("magnitude", "max_seeds", "min_ssim", "random_seed", "split", "split_seed", "uniform_share"):
        if name not in value:
            raise ValueError(f"{place} must have {name!r}, which is missing")
    try:
        Settings(**value)
    except (UsageError, TypeError, OverflowError) as error:
        raise ValueError(f"{place}: {error}") from error


def _distribution(value: Any, place: str) -> None:
    from themis.perturb.distribution import read_distribution

    text()(value, place)
    try:
        read_distribution(value, has_files=False)
    except UsageError as error:
        raise ValueError(f"{place}: {error}") from error


def _theta(value: Any, place: str) -> None:
    record(
        {
            **dict.fromkeys(("low", "high", "identity"), number()),
            **dict.fromkeys(("name", "unit"), NAME_FORM),
            "limits": items(optional(number()), 2),
        },
        {"distribution": _distribution},
        is_closed=True,
    )(value, place)
    if not value["name"].isidentifier():
        raise ValueError(f"{place}.name must be letters, digits and _, got {value['name'][:60]!r}")
    if not value["low"] <= value["identity"] <= value["high"] or value["low"] == value["high"]:
        raise ValueError(f"{place} must have low <= identity <= high and low < high")


def _thetas(value: Any, place: str) -> None:
    items(_theta)(value, place)
    names = [theta["name"].casefold() for theta in value]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{place} must be one or more dimensions with distinct names")


def _bounds(value: Any, place: str) -> None:
    items(number(), 2)(value, place)
    if not value[0] < value[1]:
        raise ValueError(f"{place} must be two ascending numbers, got {value}")


def _check_layers(start: dict[str, Any]) -> None:
    stop = 0
    for k, layer in enumerate(start["layers"]):
        if layer["start"] != stop:
            raise ValueError(f"start.layers[{k}].start must be {stop}, got {layer['start']}")
        stop += layer["n_neurons"]
    if stop != start["n_neurons"]:
        raise ValueError(f"start.n_neurons must be {stop}, the sum over its layers, got {start['n_neurons']}")
    names = [layer["name"] for layer in start["layers"]]
    if len(set(names)) < len(names):
        raise ValueError("start.layers must have distinct names")


LAYER_FORM = record(
    {
        "name": NAME_FORM,
        "shape": items(whole(0, 1 << 40)),
        "start": whole(),
        "n_neurons": whole(0, 1 << 40),
        "channel_axis": optional(whole(None)),
    },
    is_closed=True,
)
CRITERION_FORM = record({"name": NAME_FORM, "is_share": flag})
CLEAN_SCORE_FORMS = {
    "clean_accuracy": optional(SHARE_FORM),
    **dict.fromkeys(("clean_error", "clean_iou"), optional(number())),
}
START_FORM = record(
    {
        "bounds": _bounds,
        "layers": items(LAYER_FORM),
        **dict.fromkeys(("perturbation", "device", "oracle", "oracle_asked"), NAME_FORM),
        **dict.fromkeys(("n_neurons", "n_seeds", "n_usable", "n_kept"), whole()),
        **CLEAN_SCORE_FORMS,
        "chunk": whole(1, MAX_CHUNK),
        "gives_probabilities": flag,
        "fault": text(),
    },
    {
        "tests_before": TESTS_FORM,
        "kept_bytes": optional(whole()),
        "criterion": optional(CRITERION_FORM),
        "classes": optional(items(NAME_FORM)),
        "clean_map": optional(SHARE_FORM),
        **dict.fromkeys(("entry", "perturbed", "slight", "left_out", "constant"), optional(text())),
    },
    is_closed=True,
)
ORIGIN_FORM = record(
    {"bounds": _bounds},
    {
        **dict.fromkeys(("model", "data"), text()),
        **dict.fromkeys(("weights", "train", "features", "device", "folder", "zoo"), optional(text())),
        **dict.fromkeys(("output", "perturbed", "autocast", "against"), optional(text())),
        **dict.fromkeys(("rivals", "classes", "layers", "trust"), optional(items(text()))),
        **dict.fromkeys(("mean", "std"), optional(items(number()))),
        "label_order": optional(items(whole())),
        "channels": one_of("auto", "first", "last"),
        "neurons": one_of("element", "channel"),
        "oracle": text(),
    },
)
SCALAR_FORM = either(optional(text()), flag, number())
ENVIRONMENT_FORM = all_of(
    record(
        {"threads": whole(1, 4096), "model_sha256": HASH_FORM, "data_sha256": HASH_FORM},
        {
            "weights_sha256": optional(HASH_FORM),
            "reference_sha256": HASH_FORM,
            "deterministic": flag,
            "compiled_fold": flag,
            "mkl_cbwr": optional(text()),
        },
    ),
    values_of(SCALAR_FORM),
)

VALUES_FORM = optional(items(SCALAR_FORM))
CODING_FORM = record(
    {
        "library": one_of("pandas", "polars"),
        "columns": items(
            record(
                {
                    "name": text(),
                    "type": text(100, r"\w[\w\[\]]*", "a type of a column"),
                    "values": VALUES_FORM,
                    "categories": VALUES_FORM,
                    "is_ordered": flag,
                    "missing": optional(whole()),
                    "has_none": flag,
                },
                is_closed=True,
            )
        ),
    },
    is_closed=True,
)


def _rows(value: Any, place: str) -> None:
    items(items(number()))(value, place)
    if len({len(row) for row in value}) != 1:
        raise ValueError(f"{place} must have rows of one length")


RECORD_FORM = record(
    {
        "settings": _settings,
        "origin": optional(ORIGIN_FORM),
        "perturbation": NAME_FORM,
        "perturbation_code": text(),
        "theta": _thetas,
        "environment": ENVIRONMENT_FORM,
        "train_sha256": optional(HASH_FORM),
        "criterion_sha256": optional(HASH_FORM),
        "rivals_sha256": items(HASH_FORM),
    },
    {
        "start": START_FORM,
        "seed_weights_sha256": HASH_FORM,
        "samples": record({"outputs": _rows, "inputs": optional(_rows)}),
        "tag": optional(HASH_FORM),
        "failed": optional(text(1 << 20)),
        "parts": optional(record({"search": whole(), "train": whole(), "judge": whole(), "sha256": HASH_FORM})),
        "features_sha256": HASH_FORM,
        "feature_names": items(text()),
        "feature_axes": values_of(items(number())),
        "coding": CODING_FORM,
    },
)
"""The values in the table `run`, by name. `samples` and `start` are added once the clean inputs have been run, and
`failed` if the campaign fails."""

ESTIMATE_FORM = record(dict.fromkeys(("value", "low", "high"), number()), is_closed=True)
SECONDS_FORM = record(dict.fromkeys(("measure", "judge", "search", "total"), number(0)), is_closed=True)
KINDS_FORM = values_of(record({"tests": TESTS_FORM, "faults": TESTS_FORM}, is_closed=True))
NORMALITY_FORM = record(
    {
        **dict.fromkeys(("skewness_signed", "kurtosis_signed", "compatible_signed"), number()),
        **dict.fromkeys(("skewness_absolute", "kurtosis_absolute", "compatible_absolute"), number()),
        **dict.fromkeys(("n_neurons", "n_unmoved"), whole()),
        **dict.fromkeys(("verdict", "sentence"), text()),
    },
    is_closed=True,
)
ROUND_ESTIMATE_FORMS = {
    **dict.fromkeys(("residual_risk", "reachable_faults", "reachable_seeds"), optional(ESTIMATE_FORM)),
    "recall": optional(SHARE_FORM),
    "forecast_faults_tests": optional(whole()),
}
ESTIMATES_FORM = record({}, ROUND_ESTIMATE_FORMS, is_closed=True)
"""The estimates of a round, which are stored as JSON."""
STRENGTH_PART_FORM = record(
    {"low": SHARE_FORM, "high": SHARE_FORM, "tests": TESTS_FORM, "correct": ESTIMATE_FORM}, is_closed=True
)
SLICE_RATE_FORM = record(
    {
        **dict.fromkeys(("column", "value"), text()),
        "seeds": COUNT_FORM,
        "tests": TESTS_FORM,
        "fault_rate": optional(ESTIMATE_FORM),
        "at_least": SHARE_FORM,
    },
    is_closed=True,
)
REQUESTS_FORM = record(
    dict.fromkeys(("inputs", "calls", "repeated"), COUNT_FORM), {"cached": COUNT_FORM}, is_closed=True
)
DECISION_FORM = record(
    {
        "claim": NAME_FORM,
        "verdict": one_of(*VERDICTS),
        **dict.fromkeys(("tests", "faults"), TESTS_FORM),
        **dict.fromkeys(("more_tests", "more_seeds"), optional(COUNT_FORM)),
    },
    {"known": optional(TESTS_FORM)},
    is_closed=True,
)
SUMMARY_FORM = record(
    {
        "stop": text(1 << 20),
        "stop_reason": one_of(*STOP_REASONS),
        **dict.fromkeys(("perturbation", "oracle", "version"), NAME_FORM),
        **dict.fromkeys(("coverage", "coverage_all"), SHARE_FORM),
        "coverage_uniform": optional(SHARE_FORM),
        "coverage_by_layer": values_of(optional(SHARE_FORM)),
        "design_effect": optional(number()),
        "forecast_tests": optional(whole()),
        **dict.fromkeys(("tests", "dropped_tests", "faults", "distinct_faults", "failing_seeds", "rounds"), TESTS_FORM),
        "passes": COUNT_FORM,
        **dict.fromkeys(("seeds", "seeds_given", "neurons", "neurons_dead", "neurons_unseen", "random_seed"), whole()),
        **CLEAN_SCORE_FORMS,
        **dict.fromkeys(("coverage_interval", "fault_rate", "residual_risk"), optional(ESTIMATE_FORM)),
        "normality": optional(NORMALITY_FORM),
        "kinds": KINDS_FORM,
        "criterion": optional(all_of(CRITERION_FORM, record({"score": optional(number()), "raised": TESTS_FORM}))),
        "policy": record({"name": NAME_FORM}),
        "seconds": SECONDS_FORM,
    },
    {
        "near_ties": TESTS_FORM,
        "decision": optional(DECISION_FORM),
        "requests": optional(REQUESTS_FORM),
        "correct_by_strength": items(STRENGTH_PART_FORM),
        "calibration": optional(record(dict.fromkeys(("clean", "disturbed"), optional(ESTIMATE_FORM)), is_closed=True)),
        "profile": optional(text()),
        "slices": items(SLICE_RATE_FORM),
        "fault": text(),
        **dict.fromkeys(("left_out", "constant"), optional(text())),
        "residual_risk_uniform": optional(ESTIMATE_FORM),
        **ROUND_ESTIMATE_FORMS,
    },
)
"""The content of summary.json."""


@dataclass(frozen=True)
class RoundColumn:
    """A column of the table `rounds`, which holds the field of a `Round` with its name, or a field of its coverage."""

    name: str
    sql_type: str
    form: Form
    help: str
    of_coverage: str = ""
    """The field of the round's `Coverage`, if it holds one."""


ROUND_COLUMNS = (
    RoundColumn("number", "INTEGER PRIMARY KEY", whole(1, MAX_TESTS), "number of the round"),
    RoundColumn("tests", "INTEGER NOT NULL", TESTS_FORM, "number of tests"),
    RoundColumn("dropped", "INTEGER NOT NULL", TESTS_FORM, "of these, tests not run: too dissimilar from the seed"),
    RoundColumn("passes", "INTEGER NOT NULL", COUNT_FORM, "a forward pass counts 1, a backward pass 2"),
    RoundColumn("faults", "INTEGER NOT NULL", TESTS_FORM, "number of faults"),
    RoundColumn("distinct_faults", "INTEGER NOT NULL", TESTS_FORM, "distinct pairs of seed and wrong outcome"),
    RoundColumn("failing_seeds", "INTEGER NOT NULL", TESTS_FORM, "seeds with a fault"),
    RoundColumn("seconds", "REAL NOT NULL", number(0), "time of the campaign"),
    RoundColumn("coverage", "REAL NOT NULL", SHARE_FORM, "share of the sampled neurons that have converged", "sampled"),
    RoundColumn("coverage_all", "REAL NOT NULL", SHARE_FORM, "the same for all judged neurons", "all"),
    RoundColumn("coverage_by_layer", "TEXT NOT NULL", text(MAX_JSON), "JSON, layer to share", "by_layer"),
    RoundColumn("neurons", "INTEGER NOT NULL", whole(), "number of neurons", "n_neurons"),
    RoundColumn("neurons_dead", "INTEGER NOT NULL", whole(), "of these, neurons that never move", "n_dead"),
    RoundColumn("neurons_unseen", "INTEGER NOT NULL", whole(), "of these, neurons that have not moved yet", "n_unseen"),
    RoundColumn("judged_tests", "INTEGER NOT NULL", TESTS_FORM, "tests that the coverage is based on", "tests"),
    RoundColumn("forecast_tests", "INTEGER", optional(whole()), "tests still needed for the coverage goal", "forecast"),
    RoundColumn("criterion_score", "REAL", optional(number()), "of the campaign's criterion; NULL if it has none"),
    RoundColumn("estimates", "TEXT", optional(text(MAX_JSON)), "JSON, name to value, low and high"),
)
"""The columns of the table `rounds`, in order."""
CHECKPOINT_FORMS: dict[str, Form] = {
    "tests": TESTS_FORM,
    "rounds": TESTS_FORM,
    "file": text(100, STATE_FILE, "the name of a file such as 000000320-000002-7d3795b0.safetensors"),
}
"""The columns of the table `checkpoint`, except its key."""
PROGRESS_FORM = record(
    {
        "chunk": whole(1, MAX_CHUNK),
        "passes": COUNT_FORM,
        "seconds": SECONDS_FORM,
        "tally": record(
            {
                "counts": record(dict.fromkeys(("tests", "dropped", "faults", "uniform_tests", "raised"), TESTS_FORM)),
                "kinds": KINDS_FORM,
            }
        ),
        "moments": anything,
    }
)
"""The plain values of a checkpoint that readers of a run folder use."""


def check_row(row: Sequence[Any], forms: Mapping[str, Form], table: str, path: Path) -> None:
    """Raise an error if a row does not have the form of its columns."""
    with damage_explained(path):
        for (name, form), value in zip(forms.items(), row, strict=True):
            form(value, f"{table}.{name}")


def fault_conditions(theta: Sequence[Mapping[str, Any]], n_layers: int) -> dict[str, str]:
    """For each column of a fault, the SQL condition that valid values meet.

    SQLite orders numbers before texts and blobs, so that a range of numbers excludes texts and blobs.
    """
    # With up to 30 layers, even digits without any comma between them form a number that fits into a float.
    short = "AND NOT signature GLOB '*[0-9][0-9][0-9][0-9][0-9][0-9]*'" if n_layers > 30 else ""
    conditions = {column.name: _condition(column) for column in PLAIN_COLUMNS}
    conditions["position"] = conditions.pop("position") + " AND position < chunk"  # checked after chunk
    conditions["perturbation"] = "perturbation = :perturbation"
    conditions["signature"] = (
        f"typeof(signature) = 'text' AND length(signature) <= {8 * n_layers + 2} "
        f"AND NOT signature GLOB '?*[^]0-9, ]*' {short} "
        f"AND CASE WHEN json_valid(signature) THEN json_array_length(signature) = {n_layers} ELSE 0 END"
    )
    conditions["tensors"] = (
        "tensors IS NULL OR (typeof(tensors) = 'text' AND length(tensors) BETWEEN 18 AND 30 "
        "AND tensors GLOB '*.safetensors' AND NOT substr(tensors, 1, length(tensors) - 12) GLOB '*[^0-9]*')"
    )
    for dimension in theta:
        low, high = float(dimension["low"]), float(dimension["high"])
        slack = 1e-3 * (high - low)
        ends = max(low - slack, -MAX_REAL), min(high + slack, MAX_REAL)
        conditions[f"theta_{dimension['name']}"] = _between(theta_column(dimension["name"]), *ends)
    return conditions


def _condition(column: Column) -> str:
    """The SQL condition that valid values of a column meet."""
    name, low, high = column.name, column.low, column.high
    if column.type == "bool":
        condition = f"typeof({name}) = 'integer' AND {name} IN (0, 1)"
    elif column.values:
        condition = f"{name} IN ({', '.join(map(repr, column.values))})"
    elif column.type == "str":
        condition = f"typeof({name}) = 'text' AND length({name}) <= 100"
    elif column.type == "int":
        condition = f"typeof({name}) = 'integer' AND {name} BETWEEN {max(low, -(2**63))} AND {min(high, 2**63 - 1)}"
    else:
        condition = _between(name, low, high)
    return condition if column.missing is None else f"({name} IS NULL OR {condition})"


def _between(name: str, low: float, high: float) -> str:
    low_text, high_text = (repr(end).replace("inf", "9e999") for end in (low, high))
    return f"{name} BETWEEN {low_text} AND {high_text}"


def find_invalid_fault(
    execute: Callable[..., sqlite3.Cursor], values: dict[str, Any], n_layers: int
) -> tuple[Any, str] | None:
    """The id and the column of a row of the table `faults` with an invalid value; None if all rows are valid."""
    conditions = fault_conditions(values["theta"], n_layers)
    invalid = {name: f"({condition}) IS NOT TRUE" for name, condition in conditions.items()}
    columns = " ".join(f"WHEN {condition} THEN '{name}'" for name, condition in invalid.items())
    query = f"SELECT id, CASE {columns} END FROM faults WHERE {' OR '.join(invalid.values())} LIMIT 1"
    found: tuple[Any, str] | None = execute(query, {"perturbation": values["perturbation"]}).fetchone()
    return found
