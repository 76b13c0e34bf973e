//! Names of the protocol extensions that this client uses, as `environment/info` lists them.

use exec_server_protocol::MethodId;

pub(crate) const SESSION_END: &str = MethodId::SessionEnd.extension("session/end");
pub(crate) const SESSION_END_GRACE: &str = MethodId::SessionEnd.extension("session/end#graceMs");
pub(crate) const CLOSE_STDIN: &str = MethodId::ProcessCloseStdin.extension("process/closeStdin");
pub(crate) const RESIZE: &str = MethodId::ProcessResize.extension("process/resize");
pub(crate) const WAIT: &str = MethodId::ProcessWait.extension("process/wait");
pub(crate) const WAIT_FOR: &str = MethodId::ProcessWaitFor.extension("process/waitFor");
pub(crate) const SNAPSHOT: &str = MethodId::ProcessSnapshot.extension("process/snapshot");
pub(crate) const PAUSE_OUTPUT: &str = MethodId::ProcessPauseOutput.extension("process/pauseOutput");
pub(crate) const LIST: &str = MethodId::ProcessList.extension("process/list");
/// `delivery` of `process/start`.
pub(crate) const DELIVERY: &str = MethodId::ProcessStart.extension("process/start#delivery");
/// `startId` of `process/start`.
pub(crate) const START_ID: &str = MethodId::ProcessStart.extension("process/start#startId");
/// `scope` of `process/signal`; servers that have it also support signals other than `interrupt`.
pub(crate) const SIGNAL_SCOPE: &str = MethodId::ProcessSignal.extension("process/signal#scope");
/// `mode` of `process/terminate`.
pub(crate) const TERMINATE_MODE: &str =
    MethodId::ProcessTerminate.extension("process/terminate#mode");
/// `wait` of `process/terminate`.
pub(crate) const TERMINATE_WAIT: &str =
    MethodId::ProcessTerminate.extension("process/terminate#wait");
/// `evicted` in the result of `process/read`.
pub(crate) const READ_EVICTED: &str = MethodId::ProcessRead.extension("process/read#evicted");
/// The mode `atomic` of `fs/open`.
pub(crate) const OPEN_ATOMIC: &str = MethodId::FsOpen.extension("fs/open#atomic");
/// The mode `update` of `fs/open`.
pub(crate) const OPEN_UPDATE: &str = MethodId::FsOpen.extension("fs/open#update");
/// `identity` of `fs/open`.
pub(crate) const OPEN_IDENTITY: &str = MethodId::FsOpen.extension("fs/open#identity");
/// `commit` of `fs/close`.
pub(crate) const CLOSE_COMMIT: &str = MethodId::FsClose.extension("fs/close#commit");
/// `mode` of `fs/writeFile`.
pub(crate) const WRITE_FILE_MODE: &str = MethodId::FsWriteFile.extension("fs/writeFile#mode");
/// `modifiedAtMs` of `fs/writeFile`.
pub(crate) const WRITE_FILE_MODIFIED: &str =
    MethodId::FsWriteFile.extension("fs/writeFile#modifiedAtMs");
/// `createMode` of `fs/writeFile`.
pub(crate) const WRITE_FILE_CREATE_MODE: &str =
    MethodId::FsWriteFile.extension("fs/writeFile#createMode");
/// `owner` of `fs/writeFile`.
pub(crate) const WRITE_FILE_OWNER: &str = MethodId::FsWriteFile.extension("fs/writeFile#owner");
/// `createMode` of `fs/open`.
pub(crate) const OPEN_CREATE_MODE: &str = MethodId::FsOpen.extension("fs/open#createMode");
/// `createMode` of `fs/createDirectory`.
pub(crate) const CREATE_DIRECTORY_MODE: &str =
    MethodId::FsCreateDirectory.extension("fs/createDirectory#createMode");
/// `owner` of `fs/setMetadata`.
pub(crate) const SET_METADATA_OWNER: &str =
    MethodId::FsSetMetadata.extension("fs/setMetadata#owner");
/// `hardLink` of `fs/copy`.
pub(crate) const COPY_HARD_LINK: &str = MethodId::FsCopy.extension("fs/copy#hardLink");
/// `metadata` of `fs/readDirectory`.
pub(crate) const READ_DIRECTORY_METADATA: &str =
    MethodId::FsReadDirectory.extension("fs/readDirectory#metadata");
/// `links` of `fs/readDirectory`.
pub(crate) const READ_DIRECTORY_LINKS: &str =
    MethodId::FsReadDirectory.extension("fs/readDirectory#links");
/// `limit`, `after` and `next` of `fs/readDirectory`.
pub(crate) const READ_DIRECTORY_PAGES: &str =
    MethodId::FsReadDirectory.extension("fs/readDirectory#after");
/// `limit`, `after` and `next` of `fs/walk`.
pub(crate) const WALK_PAGES: &str = MethodId::FsWalk.extension("fs/walk#after");
pub(crate) const RENAME: &str = MethodId::FsRename.extension("fs/rename");
pub(crate) const SET_METADATA: &str = MethodId::FsSetMetadata.extension("fs/setMetadata");
pub(crate) const CREATE_SYMLINK: &str = MethodId::FsCreateSymlink.extension("fs/createSymlink");
pub(crate) const HASH: &str = MethodId::FsHash.extension("fs/hash");
pub(crate) const SEARCH: &str = MethodId::FsSearch.extension("fs/search");
pub(crate) const WATCH: &str = MethodId::FsWatch.extension("fs/watch");
pub(crate) const HTTP_CANCEL: &str = MethodId::HttpCancel.extension("http/cancel");
/// `decompress` of `http/request`.
pub(crate) const HTTP_DECOMPRESS: &str = MethodId::HttpRequest.extension("http/request#decompress");
