"""Settings of reading files: how large, how long and how many at a time. Users import them from `config.settings`."""

from dataclasses import dataclass

from stillroom.config.quantities import AboveZero, AtLeastZero


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsConfig:
    """What one file may cost. A file that costs more is reported with its reason, and the others go on."""

    num_workers: AtLeastZero = 0
    """Processes that read files. 0: one for each core, at most 8."""
    timeout_s: AboveZero = 120.0
    """Seconds for one file; a reader that takes longer is stopped."""
    max_file_bytes: int = 256 * 2**20
    """Of a file on disk; JSONL files, which are read line by line, may be larger."""
    max_text_bytes: int = 32 * 2**20
    """Of the text made of one file, or of one line of a JSONL file: 32 MiB are some 10,000 pages. A table repeats the
    names of its columns in each row, and they count each time."""
    max_expanded_bytes: int = 128 * 2**20
    """Of that text with the headings above each paragraph, which count each time."""
    max_paragraphs: int = 500_000
    """Paragraphs of one document: a file, or a line of a JSONL file. Each row of a table is one."""
    max_chunks: int = 20_000
    """Chunks of one document. Each is embedded, some 60 a second on two cores."""
    max_unpacked_bytes: int = 1024 * 2**20
    """Of all that a DOCX, PPTX, XLSX or EPUB file holds, unpacked: a small file can unpack to more than a disk."""
    max_reader_bytes: int = 2048 * 2**20
    """Memory that a reading process may take on top of what it starts with (where the system can limit it: Linux)."""
