"""Parquet tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import check_disk, check_memory, data_errors, existing_file
from themis.data.seeds import Seeds
from themis.data.tables import CELLS_AT_ONCE, Block, Columns, NotNumbersError, coded_seeds, pandas_for, seeds_of_blocks
from themis.errors import DataError, needs_extra


def parquet_seeds(path: Path, *, label: str | None = None, drop: str = "") -> Seeds:
    """A Parquet table; label and drop as for CSV."""
    path = existing_file(path)
    with needs_extra("tables", "reading Parquet needs pyarrow"):
        from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]
    with data_errors(path, "a Parquet table"), parquet.ParquetFile(path) as table:
        columns = Columns(table.schema_arrow.names, path, label, drop)
        check_disk(table.metadata.num_rows * 4 * len(columns.features), str(path))
        check_memory(max(_group_bytes(table.metadata), default=0), f"{path}, a row group")
        try:
            return seeds_of_blocks(columns, _parquet_blocks(table, columns), table.metadata.num_rows)
        except NotNumbersError as error:
            pandas_for(error)
        check_memory(2 * sum(_group_bytes(table.metadata)), str(path))
        return coded_seeds(table.read().to_pandas(), columns)


def _parquet_blocks(table: Any, columns: Columns) -> Iterator[Block]:
    from pyarrow import types

    names = [columns.names[k] for k in columns.features]
    fields = table.schema_arrow
    for k in columns.features:
        kind = fields.field(k).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            is_name = types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
            raise (NotNumbersError if is_name else DataError)(
                f"{columns.path}: column {columns.names[k]!r} must be numbers, but it is {kind}: leave it out with "
                f"?drop={columns.names[k]}"
            )
    requested = [*names, *([columns.label] if columns.label is not None else [])]
    first = 0
    for batch in table.iter_batches(max(1, CELLS_AT_ONCE // len(requested)), columns=requested):
        if columns.label is not None and batch.column(columns.label).null_count:
            row = first + batch.column(columns.label).is_null().to_pylist().index(True) + 1
            raise columns.no_label(f"row {row}")
        features = np.empty((batch.num_rows, len(names)), np.float32)
        for k, name in enumerate(names):
            with np.errstate(over="ignore"):
                features[:, k] = batch.column(name).to_numpy(zero_copy_only=False)
        bad = np.argwhere(~np.isfinite(features))
        if len(bad):
            row, name = first + int(bad[0][0]) + 1, names[int(bad[0][1])]
            raise NotNumbersError(
                f"{columns.path}, row {row}: column {name!r} must be a finite number, but it is not, or is empty: fix "
                "or drop the row"
            )
        labels: Any = [] if columns.label is None else batch.column(columns.label)
        if columns.label is not None and (types.is_integer(labels.type) or types.is_floating(labels.type)):
            labels = labels.to_numpy(zero_copy_only=False)
        elif columns.label is not None:
            labels = labels.to_pylist()
        yield features, labels
        first += batch.num_rows


def _group_bytes(metadata: Any) -> Iterator[int]:
    return (metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
