//! Names of the extensions that this client makes use of, as `environment/info` lists them.

use exec_server_protocol::Method;
use exec_server_protocol::{fs, http, process, session};

pub(crate) const SESSION_END: &str = session::End::NAME;
pub(crate) const CLOSE_STDIN: &str = process::CloseStdin::NAME;
pub(crate) const RESIZE: &str = process::Resize::NAME;
pub(crate) const WAIT: &str = process::Wait::NAME;
pub(crate) const WAIT_FOR: &str = process::WaitFor::NAME;
pub(crate) const SNAPSHOT: &str = process::Snapshot::NAME;
pub(crate) const LIST: &str = process::List::NAME;
/// `delivery` of `process/start`.
pub(crate) const DELIVERY: &str = "process/start#delivery";
/// `startId` of `process/start`.
pub(crate) const START_ID: &str = "process/start#startId";
/// `scope` of `process/signal`; it came together with the signals beside `interrupt`.
pub(crate) const SIGNAL_SCOPE: &str = "process/signal#scope";
/// `mode` of `process/terminate`.
pub(crate) const TERMINATE_MODE: &str = "process/terminate#mode";
/// `wait` of `process/terminate`.
pub(crate) const TERMINATE_WAIT: &str = "process/terminate#wait";
/// `evicted` in the result of `process/read`.
pub(crate) const READ_EVICTED: &str = "process/read#evicted";
/// The mode `atomic` of `fs/open`.
pub(crate) const OPEN_ATOMIC: &str = "fs/open#atomic";
/// The mode `update` of `fs/open`.
pub(crate) const OPEN_UPDATE: &str = "fs/open#update";
/// `identity` of `fs/open`.
pub(crate) const OPEN_IDENTITY: &str = "fs/open#identity";
/// `commit` of `fs/close`.
pub(crate) const CLOSE_COMMIT: &str = "fs/close#commit";
/// `mode` of `fs/writeFile`.
pub(crate) const WRITE_FILE_MODE: &str = "fs/writeFile#mode";
/// `modifiedAtMs` of `fs/writeFile`.
pub(crate) const WRITE_FILE_MODIFIED: &str = "fs/writeFile#modifiedAtMs";
/// `links` of `fs/readDirectory`.
pub(crate) const READ_DIRECTORY_LINKS: &str = "fs/readDirectory#links";
pub(crate) const RENAME: &str = fs::Rename::NAME;
pub(crate) const SET_METADATA: &str = fs::SetMetadata::NAME;
pub(crate) const CREATE_SYMLINK: &str = fs::CreateSymlink::NAME;
pub(crate) const HASH: &str = fs::Hash::NAME;
pub(crate) const SEARCH: &str = fs::Search::NAME;
pub(crate) const WATCH: &str = fs::Watch::NAME;
pub(crate) const HTTP_CANCEL: &str = http::Cancel::NAME;
/// `decompress` of `http/request`.
pub(crate) const HTTP_DECOMPRESS: &str = "http/request#decompress";
