//! Limits of the wire that both sides share.

/// Maximum number of JSON values (objects, arrays and scalars) allowed in one message.
///
/// One megabyte of `[0,0,0,…]` decodes into a tree of many times its size; a limit on values bounds
/// the memory where a limit on bytes does not.
pub const MAX_JSON_VALUES: usize = 262_144;

/// Maximum number of levels of nested objects and arrays in one message, including the message itself.
///
/// Equals the limit of compatible peers; far below the depth that overflows the stack.
pub const MAX_JSON_DEPTH: usize = 127;

/// Maximum number of bytes of one message, after reassembly of websocket fragments, in either direction: 64 MiB.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Maximum number of payload bytes of one websocket frame that a server accepts: 16 MiB.
///
/// A client accepts a whole message in one frame, because compatible servers do not fragment.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// Maximum number of payload bytes of one websocket frame that this side sends: 4 MiB; longer messages are
/// fragmented.
///
/// Compatible peers reject frames above 16 MiB; a quarter of that lets control frames pass between
/// the fragments.
pub const SEND_FRAME_BYTES: usize = 4 << 20;

/// Maximum number of bytes of output in one chunk; compatible clients fail a process whose chunk is larger.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;

/// Maximum number of bytes of one `fs/readBlock` or `fs/writeBlock`.
pub const MAX_BLOCK_BYTES: usize = 1 << 20;

/// Maximum number of bytes of a file handle id, which the client chooses.
pub const MAX_HANDLE_ID_BYTES: usize = 32;

/// Maximum number of open file handles of one connection.
pub const MAX_FILE_HANDLES: usize = 128;

/// The largest file that `fs/readFile` reads.
pub const MAX_READ_FILE_BYTES: u64 = 512 << 20;

/// Maximum number of entries on one page of an `fs/readDirectory` or `fs/walk`, as many as compatible servers list at all:
/// the response has a few values for each, and [`MAX_JSON_VALUES`] is what a peer takes.
pub const MAX_PAGE_ENTRIES: usize = 50_000;

/// 10,000: maximum number of entries in a page of a directory with metadata. An entry has 13 JSON
/// values, and peers limit the number of values in a message.
pub const MAX_METADATA_ENTRIES: usize = 10_000;

/// Maximum number of bytes in an `after` of these: the base64 of a path, which has at most 4096.
pub const MAX_CURSOR_BYTES: usize = 8 << 10;

/// Maximum number of globs in one `fs/search` or `fs/watch`; each is compiled and matched against every path.
pub const MAX_GLOBS: usize = 256;

/// Maximum number of bytes of one glob.
pub const MAX_GLOB_BYTES: usize = 4096;

/// Maximum number of bytes of the pattern of an `fs/search`.
pub const MAX_SEARCH_PATTERN_BYTES: usize = 64 << 10;

/// Maximum number of context lines on each side of a match of `fs/search`.
pub const MAX_SEARCH_CONTEXT_LINES: usize = 100;

/// Maximum number of bytes of one line in the result of `fs/search`; longer lines are truncated.
pub const MAX_SEARCH_TEXT_BYTES: usize = 4096;

/// Maximum number of bytes of paths and lines in the result of one `fs/search`; further matches are omitted.
pub const MAX_SEARCH_REPLY_BYTES: usize = 4 << 20;

/// Maximum number of bytes of a watch id, which the client chooses.
pub const MAX_WATCH_ID_BYTES: usize = 256;

/// Maximum number of watches of one connection.
pub const MAX_WATCHES: usize = 32;

/// Maximum time that an `fs/watch` collects changes.
pub const MAX_WATCH_DEBOUNCE_MS: u64 = 60_000;

/// Maximum number of changes in one `fs/changed`.
pub const MAX_CHANGES: usize = 1000;

/// Maximum number of paths in one `fs/watchMissing`.
pub const MAX_MISSING_PATHS: usize = 64;

/// Maximum number of keys in one `environmentConfig/read`.
pub const MAX_CONFIG_PATHS: usize = 1024;

/// Maximum number of bytes of one file that `environmentConfig/read` parses.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Maximum number of bytes in one `http/request/bodyDelta`; compatible clients fail a stream whose piece is larger.
pub const MAX_DELTA_BYTES: usize = 1 << 20;

/// Maximum number of concurrent HTTP requests of one connection, including streamed bodies.
pub const MAX_HTTP_REQUESTS: usize = 256;

/// Evicted output events whose sizes the server keeps individually; of older ones it keeps the sum.
pub const EVICTED_SIZES: u64 = 65_536;
