"""Documents of tabular files: Parquet, and the Arrow streams of a Hugging Face ``datasets`` folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_diloco.errors import UserError

TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 1024  # read at once


def table_documents(
    file: BinaryIO, path: Path, text_key: str, setting: str, part: tuple[int, int] | None
) -> Iterator[str]:
    """Non-empty texts of the column ``text_key``. part: row groups [begin, end) of a Parquet file; None = all.

    Raises UserError naming the file when it cannot be read or has no such column of text.
    """
    row = 0
    try:
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(file)
            _check(parquet.schema_arrow, path, text_key, setting)
            if part is not None:  # rows are counted from the begin of the file
                row = sum(parquet.metadata.row_group(i).num_rows for i in range(part[0]))
            groups = None if part is None else list(range(*part))
            batches = parquet.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_key])
        else:
            reader = pa.ipc.open_stream(file)
            _check(reader.schema, path, text_key, setting)
            batches = iter(reader)
        for batch in batches:
            column = batch.column(batch.schema.get_field_index(text_key))
            try:
                texts = column.to_pylist()
            except UnicodeDecodeError:
                number = row + next(i for i, value in enumerate(column, 1) if not _is_unicode(value))
                raise UserError(f"{setting}: {path}, row {number}: not UTF-8 text") from None
            for text in texts:
                row += 1
                if text is None:
                    raise UserError(
                        f"{setting}: {path}, row {row}: no text in the column {text_key!r}; leave such rows out"
                    )
                if text.strip():
                    yield text
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{setting}: {path} is damaged ({error})") from error


def _is_unicode(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


def _check(schema: pa.Schema, path: Path, text_key: str, setting: str) -> None:
    index = schema.get_field_index(text_key)
    kind = schema.field(index).type if index >= 0 else None
    if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(
            f"{setting}: {path} has no column {text_key!r} with text (see --text-key); it has {columns}"
        )


def row_groups(path: Path) -> list[int]:
    """Bytes of each row group of a Parquet file. Raises pyarrow's exceptions when it is none."""
    metadata = pq.read_metadata(path)
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def datasets_files(folder: Path, setting: str) -> list[Path]:
    """The Arrow files of a folder that ``datasets.Dataset.save_to_disk`` has written, in order.

    Raises UserError naming ``setting`` when it is no such folder.
    """
    state = folder / "state.json"
    try:
        files = [folder / str(entry["filename"]) for entry in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{setting}: {folder} is not a file, nor a folder of Hugging Face datasets (state.json: {error}); give files, "
            "or what Dataset.save_to_disk wrote (of a DatasetDict: one of its sub-folders)"
        ) from error
    return files
