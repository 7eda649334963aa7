"""Folders with one folder of files per class, or with files that have no labels."""

from __future__ import annotations

import os
from pathlib import Path

from themis.data.files import data_errors
from themis.errors import DataError


def labelled_files(
    folder: Path, suffixes: tuple[str, ...], noun: str
) -> tuple[list[Path], list[int] | None, list[str] | None]:
    """The files with one of the suffixes, and their labels and the names of the classes if they are in class folders.

    Classes are numbered in the order of the folders' names. `noun` names the files in messages.
    """
    if not os.path.isdir(folder):
        raise DataError(f"the folder of {noun} must exist, but {folder} does not: check the path")
    with data_errors(folder, "a folder that can be listed"):
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        files_by_class = [_files_in(class_folder, suffixes) for class_folder in classes]
        loose = _files_in(folder, suffixes)
    if any(files_by_class) and loose:
        raise DataError(
            f"{folder} must hold either class folders or {noun}, but it has both, such as {loose[0].name}: move the "
            f"{noun} away"
        )
    if not any(files_by_class):
        return loose, None, None
    files = [file for class_files in files_by_class for file in class_files]
    labels = [k for k, class_files in enumerate(files_by_class) for _ in class_files]
    return files, labels, [path.name for path in classes]


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())
