"""SQL of knowledge bases in PostgreSQL. No connection here.

Several knowledge bases share the tables of the schema `stillroom`; `kb` is the number of one. Every commit raises its
`revision`, and stamps the rows that it writes with it; `removals` and `tombstones` have stamps of the rows that it
deletes. So a local copy asks for the rows that were stamped after its own revision. `generation` is that of `Corpus`:
it rises with changes of documents only.

Releases before vector sets and pgvector would mix the vectors of two models in a knowledge base whose embedder was
changed, and would open one whose vectors are in pgvector. So the switch, and the making of the latter, raise the
version of the tables, which such a release refuses when it opens any knowledge base. The switch also marks `corpus_id`
(`REFUSE_OLD_PROGRAMS`): a program that runs already then takes the knowledge base for a replaced one, and commits
nothing.

Names can be longer than an index entry, so rows are found by `key`, a hash of the name (`key_of`).
"""

import hashlib

FIRST_VERSION, NEWEST_VERSION = 1, 2
"""Version 2: the vectors of some knowledge base were replaced by those of another model, or are in pgvector."""

IS_THERE = "SELECT to_regclass('stillroom.format') IS NOT NULL"
SELECT_VERSION = "SELECT version FROM stillroom.format"
LOCK_SCHEMA = "SELECT pg_advisory_xact_lock(7310033165)"

_OF_A_KB = "kb integer NOT NULL REFERENCES stillroom.knowledge_bases ON DELETE CASCADE"

SCHEMA = (
    "CREATE SCHEMA IF NOT EXISTS stillroom",
    """CREATE TABLE stillroom.knowledge_bases (
        kb serial PRIMARY KEY, name text NOT NULL UNIQUE, corpus_id text NOT NULL, manifest text NOT NULL,
        generation bigint NOT NULL DEFAULT 0, revision bigint NOT NULL DEFAULT 0)""",
    f"""CREATE TABLE stillroom.documents (
        {_OF_A_KB}, key bytea NOT NULL, document_id text NOT NULL, path text NOT NULL, path_key bytea NOT NULL,
        record_id text, title text NOT NULL, content_hash text NOT NULL, num_bytes bigint NOT NULL,
        num_chunks integer NOT NULL, added_at double precision NOT NULL, generation bigint NOT NULL,
        metadata text NOT NULL, public_id text NOT NULL, revision bigint NOT NULL, PRIMARY KEY (kb, key))""",
    "CREATE INDEX documents_by_path ON stillroom.documents (kb, path_key)",
    f"""CREATE TABLE stillroom.chunks (
        {_OF_A_KB}, chunk_id bigint NOT NULL, key bytea NOT NULL, document_id text NOT NULL, ordinal integer NOT NULL,
        text text NOT NULL, title text NOT NULL, heading_path text NOT NULL, num_tokens integer NOT NULL,
        start_line integer NOT NULL, end_line integer NOT NULL, record_id text, start_page integer NOT NULL,
        end_page integer NOT NULL, revision bigint NOT NULL, PRIMARY KEY (kb, chunk_id))""",
    "CREATE INDEX chunks_by_document ON stillroom.chunks (kb, key)",
    f"""CREATE TABLE stillroom.vectors (
        {_OF_A_KB}, chunk_id bigint NOT NULL, generation bigint NOT NULL, vector bytea NOT NULL,
        revision bigint NOT NULL, PRIMARY KEY (kb, chunk_id))""",
    f"""CREATE TABLE stillroom.tombstones (
        {_OF_A_KB}, chunk_id bigint NOT NULL, generation bigint NOT NULL, revision bigint NOT NULL,
        PRIMARY KEY (kb, chunk_id))""",
    f"""CREATE TABLE stillroom.sources (
        {_OF_A_KB}, key bytea NOT NULL, path text NOT NULL, size bigint NOT NULL, mtime_ns bigint NOT NULL,
        content_hash text NOT NULL, metadata text NOT NULL, revision bigint NOT NULL, PRIMARY KEY (kb, key))""",
    f"""CREATE TABLE stillroom.removals (
        {_OF_A_KB}, kind text NOT NULL, key bytea NOT NULL, name text NOT NULL, revision bigint NOT NULL,
        PRIMARY KEY (kb, kind, key))""",
    f"""CREATE TABLE stillroom.commits (
        {_OF_A_KB}, revision bigint NOT NULL, generation bigint, commit_id text NOT NULL,
        PRIMARY KEY (kb, revision))""",
    f"""CREATE TABLE stillroom.uploads (
        {_OF_A_KB}, key bytea NOT NULL, part integer NOT NULL, content bytea NOT NULL, PRIMARY KEY (kb, key, part))""",
    *(
        f"CREATE INDEX {table}_by_revision ON stillroom.{table} (kb, revision)"
        for table in ("documents", "chunks", "vectors", "tombstones", "sources", "removals")
    ),
    "CREATE TABLE stillroom.format (version integer NOT NULL)",
    f"INSERT INTO stillroom.format VALUES ({FIRST_VERSION})",
)
"""`commits.generation` is null if the commit did not raise it. `uploads` has the bytes of uploaded files, in parts."""

_CORPUS_ID = "split_part(corpus_id, ':', 1)"
"""Without the mark."""
SELECT_KB = f"SELECT kb, {_CORPUS_ID}, manifest FROM stillroom.knowledge_bases WHERE name = %s"
INSERT_KB = """INSERT INTO stillroom.knowledge_bases (name, corpus_id, manifest) VALUES (%s, %s, %s)
    ON CONFLICT (name) DO NOTHING"""
SELECT_STATE = f"SELECT {_CORPUS_ID}, generation, revision FROM stillroom.knowledge_bases WHERE kb = %s"
LOCK_STATE = f"{SELECT_STATE} FOR UPDATE"
SELECT_MANIFEST = "SELECT manifest FROM stillroom.knowledge_bases WHERE kb = %s"
UPDATE_MANIFEST = "UPDATE stillroom.knowledge_bases SET manifest = %s WHERE kb = %s"
REFUSE_OLD_PROGRAMS = (
    f"UPDATE stillroom.knowledge_bases SET corpus_id = {_CORPUS_ID} || ':{NEWEST_VERSION}' WHERE kb = %s"
)
RAISE_VERSION = f"UPDATE stillroom.format SET version = {NEWEST_VERSION} WHERE version < {NEWEST_VERSION}"
REPLACE_VECTOR = "UPDATE stillroom.vectors SET vector = %s, revision = %s WHERE kb = %s AND chunk_id = %s"
LOCK_EMBEDDER = "SELECT pg_try_advisory_lock(731003316, %s)"
UPDATE_STATE = "UPDATE stillroom.knowledge_bases SET generation = %s, revision = %s WHERE kb = %s"
SELECT_COMMIT = "SELECT commit_id FROM stillroom.commits WHERE kb = %s AND revision = %s"
INSERT_COMMIT = "INSERT INTO stillroom.commits VALUES (%s, %s, %s, %s)"
NOTIFY = "SELECT pg_notify(%s, '')"

SELECT_OLD_CHUNKS = "SELECT key, chunk_id, title, heading_path FROM stillroom.chunks WHERE kb = %s AND key = ANY(%s)"
SELECT_COMPARED = """SELECT key, path, title, metadata, content_hash FROM stillroom.documents
    WHERE kb = %s AND key = ANY(%s)"""
PUT_DOCUMENT = """INSERT INTO stillroom.documents
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (kb, key) DO UPDATE SET document_id = excluded.document_id, path = excluded.path,
    path_key = excluded.path_key, record_id = excluded.record_id, title = excluded.title,
    content_hash = excluded.content_hash, num_bytes = excluded.num_bytes, num_chunks = excluded.num_chunks,
    added_at = excluded.added_at, generation = excluded.generation, metadata = excluded.metadata,
    public_id = excluded.public_id, revision = excluded.revision"""
PUT_CHUNK = """INSERT INTO stillroom.chunks VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (kb, chunk_id) DO UPDATE SET key = excluded.key, document_id = excluded.document_id,
    ordinal = excluded.ordinal, text = excluded.text, title = excluded.title, heading_path = excluded.heading_path,
    num_tokens = excluded.num_tokens, start_line = excluded.start_line, end_line = excluded.end_line,
    record_id = excluded.record_id, start_page = excluded.start_page, end_page = excluded.end_page,
    revision = excluded.revision"""
MOVE_CHUNK = """UPDATE stillroom.chunks SET start_line = %s, end_line = %s, start_page = %s, end_page = %s,
    revision = %s WHERE kb = %s AND chunk_id = %s"""
PUT_VECTOR = """INSERT INTO stillroom.vectors VALUES (%s, %s, %s, %s, %s) ON CONFLICT (kb, chunk_id) DO UPDATE
    SET generation = excluded.generation, vector = excluded.vector, revision = excluded.revision"""
DELETE_CHUNKS = "DELETE FROM stillroom.chunks WHERE kb = %s AND chunk_id = ANY(%s)"
DELETE_VECTORS = "DELETE FROM stillroom.vectors WHERE kb = %s AND chunk_id = ANY(%s)"
DELETE_TOMBSTONES = "DELETE FROM stillroom.tombstones WHERE kb = %s AND chunk_id = ANY(%s)"
PUT_TOMBSTONES = """INSERT INTO stillroom.tombstones SELECT %s, unnest(%s::bigint[]), %s, %s
    ON CONFLICT (kb, chunk_id) DO UPDATE SET generation = excluded.generation, revision = excluded.revision"""
SELECT_CHUNK_IDS = "SELECT chunk_id FROM stillroom.chunks WHERE kb = %s AND key = ANY(%s)"
DELETE_DOCUMENTS = """DELETE FROM stillroom.documents WHERE kb = %s AND key = ANY(%s)
    RETURNING key, document_id, path_key, path"""
SELECT_DOCUMENTS_OF = "SELECT document_id, content_hash FROM stillroom.documents WHERE kb = %s AND path_key = %s"
UNREAD_SOURCES = """UPDATE stillroom.sources SET size = -1, content_hash = '', revision = %s
    WHERE kb = %s AND key = ANY(%s)"""
DELETE_EMPTY_SOURCES = """DELETE FROM stillroom.sources s WHERE s.kb = %s AND s.key = ANY(%s) AND NOT EXISTS
    (SELECT 1 FROM stillroom.documents d WHERE d.kb = s.kb AND d.path_key = s.key) RETURNING s.key, s.path"""
DELETE_SOURCE = "DELETE FROM stillroom.sources WHERE kb = %s AND key = %s RETURNING key, path"
PUT_SOURCE = """INSERT INTO stillroom.sources VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (kb, key)
    DO UPDATE SET size = excluded.size, mtime_ns = excluded.mtime_ns, content_hash = excluded.content_hash,
    metadata = excluded.metadata, revision = excluded.revision"""
PUT_REMOVAL = """INSERT INTO stillroom.removals VALUES (%s, %s, %s, %s, %s) ON CONFLICT (kb, kind, key)
    DO UPDATE SET revision = excluded.revision"""
DELETE_UPLOADS = "DELETE FROM stillroom.uploads WHERE kb = %s AND key = ANY(%s)"
PUT_UPLOAD = "INSERT INTO stillroom.uploads VALUES (%s, %s, %s, %s)"
SELECT_UPLOAD = "SELECT content FROM stillroom.uploads WHERE kb = %s AND key = %s ORDER BY part"

DOCUMENT, SOURCE = "document", "source"
"""Kinds of `removals`."""

_SINCE = "WHERE kb = %s AND revision > %s"
COPIED_REMOVALS = f"SELECT kind, name FROM stillroom.removals {_SINCE}"
COPIED_TOMBSTONES = f"SELECT chunk_id, generation FROM stillroom.tombstones {_SINCE}"
COPIED_DOCUMENTS = f"""SELECT document_id, path, record_id, title, content_hash, num_bytes, num_chunks, added_at,
    generation, metadata, public_id FROM stillroom.documents {_SINCE}"""
COPIED_CHUNKS = f"""SELECT chunk_id, document_id, ordinal, text, title, heading_path, num_tokens, start_line, end_line,
    record_id, start_page, end_page FROM stillroom.chunks {_SINCE}"""
COPIED_VECTORS = f"SELECT chunk_id, generation, vector FROM stillroom.vectors {_SINCE}"
COPIED_SOURCES = f"SELECT path, size, mtime_ns, content_hash, metadata FROM stillroom.sources {_SINCE}"
COPIED_COMMITS = f"SELECT generation, commit_id FROM stillroom.commits {_SINCE} AND generation IS NOT NULL"

_NUL, _ESCAPE = "\0", "\ufdd0"


def key_of(name: str) -> bytes:
    """Return the key of a document or file: 128 bits of a SHA-256 of its name."""
    return hashlib.sha256(name.encode()).digest()[:16]


def channel_of(kb: int) -> str:
    """Return the channel on which commits of a knowledge base are announced."""
    return f"stillroom_{kb}"


def to_text(text: str) -> str:
    """Return a text as PostgreSQL can store it: without NUL, which is escaped by the noncharacter U+FDD0."""
    return text.replace(_ESCAPE, f"{_ESCAPE}1").replace(_NUL, f"{_ESCAPE}0")


def from_text(text: str) -> str:
    """Return the text of which `to_text` returned this one."""
    return text.replace(f"{_ESCAPE}0", _NUL).replace(f"{_ESCAPE}1", _ESCAPE) if _ESCAPE in text else text
