//! Named bounds of the wire, shared by both sides.

/// JSON values (objects, arrays and scalars) allowed in one message.
///
/// A megabyte of `[0,0,0,…]` decodes into a tree many times its size; counting values bounds the
/// work of decoding where counting bytes cannot.
pub const MAX_JSON_VALUES: usize = 262_144;

/// Objects and arrays around the innermost value of one message, the message itself included.
///
/// What compatible peers accept; far below what recursion over values could exhaust.
pub const MAX_JSON_DEPTH: usize = 127;

/// Bytes in one message, after reassembly of websocket fragments, in either direction.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Payload bytes of one websocket frame that a server accepts.
///
/// A client accepts a whole message in one frame, because compatible servers send them so.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// Payload bytes of one websocket frame that this side sends; longer messages are continued.
///
/// Compatible peers refuse frames above 16 MiB; a quarter of that keeps other traffic flowing
/// between the parts.
pub const SEND_FRAME_BYTES: usize = 4 << 20;

/// Bytes of output in one chunk; compatible clients fail a process whose chunk is larger.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;

/// Bytes moved by one `fs/readBlock` or `fs/writeBlock`.
pub const MAX_BLOCK_BYTES: usize = 1 << 20;

/// Bytes in a client-chosen file handle id.
pub const MAX_HANDLE_ID_BYTES: usize = 32;

/// File handles one connection may hold.
pub const MAX_FILE_HANDLES: usize = 128;

/// Largest file that `fs/readFile` considers at all.
pub const MAX_READ_FILE_BYTES: u64 = 512 << 20;

/// Entries on one page of an `fs/readDirectory` or `fs/walk`, as many as compatible servers list at all:
/// the answer has a few values for each, and [`MAX_JSON_VALUES`] is what a peer takes.
pub const MAX_PAGE_ENTRIES: usize = 50_000;

/// Bytes in an `after` of these: the base64 of a path, which has at most 4096.
pub const MAX_CURSOR_BYTES: usize = 8 << 10;

/// Globs that one `fs/search` or `fs/watch` may name; each is compiled and matched with every path.
pub const MAX_GLOBS: usize = 256;

/// Bytes in one of them.
pub const MAX_GLOB_BYTES: usize = 4096;

/// Bytes in the pattern of an `fs/search`.
pub const MAX_SEARCH_PATTERN_BYTES: usize = 64 << 10;

/// Lines that an `fs/search` shows on either side of a match.
pub const MAX_SEARCH_CONTEXT_LINES: usize = 100;

/// Bytes of one line that an `fs/search` shows; of a longer one it shows the beginning.
pub const MAX_SEARCH_TEXT_BYTES: usize = 4096;

/// Bytes of paths and lines in the answer to one `fs/search`; what would be more is left out.
pub const MAX_SEARCH_REPLY_BYTES: usize = 4 << 20;

/// Bytes in a client-chosen watch id.
pub const MAX_WATCH_ID_BYTES: usize = 256;

/// Watches that one connection may hold.
pub const MAX_WATCHES: usize = 32;

/// The longest time that an `fs/watch` may gather changes.
pub const MAX_WATCH_DEBOUNCE_MS: u64 = 60_000;

/// Changes in one `fs/changed`.
pub const MAX_CHANGES: usize = 1000;

/// Paths that one `fs/watchMissing` may wait for.
pub const MAX_MISSING_PATHS: usize = 64;

/// Keys that one `environmentConfig/read` may ask for.
pub const MAX_CONFIG_PATHS: usize = 1024;

/// Bytes in one file that `environmentConfig/read` looks at.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Bytes in one `http/request/bodyDelta`; compatible clients fail a stream whose piece is larger.
pub const MAX_DELTA_BYTES: usize = 1 << 20;

/// Requests over HTTP that one connection may have under way, streamed bodies included.
pub const MAX_HTTP_REQUESTS: usize = 256;

/// Evicted events whose sizes a server remembers one by one; of older ones it knows the sum alone.
pub const EVICTED_SIZES: u64 = 65_536;
