//! Table of methods: params, result, scopes, changes and extensions of each method that servers
//! handle.
//!
//! Dispatch, scopes, metrics, the audit log, the list of extensions, the client's decision whether to
//! send a request again and `docs/wire.md` all use this table. Only methods with a row are
//! [`ServedMethod`]s, and a row without a function does not compile. Requests that a server sends
//! ([`network`](crate::network)) have no row.

use std::fmt;

use Scope::{Exec, FsRead, FsWrite, Observe};

use crate::method::{Empty, Method, NoParams};
pub(crate) use crate::params::EVERYWHERE;
use crate::params::SafeMembers;
use crate::path::PathUri;
use crate::{capability, command, environment, fs, http, params, process, session};

/// A group of methods that a token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Run commands; includes everything that `Observe` allows.
    Exec,
    /// Read files.
    FsRead,
    /// Change files.
    FsWrite,
    /// Read the output and state of processes.
    Observe,
}

impl Scope {
    /// All scopes.
    pub const ALL: [Self; 4] = [Self::Exec, Self::FsRead, Self::FsWrite, Self::Observe];

    /// Name of the scope in tokens and settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::FsRead => "fs:read",
            Self::FsWrite => "fs:write",
            Self::Observe => "observe",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// State that requests of a method may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodChanges {
    /// Requests change no state.
    Nothing,
    /// The session or the connection of the client itself.
    Session,
    /// Processes: requests start them, write to them or end them.
    Processes,
    /// Files, through a path or an open handle.
    Files,
    /// State of other machines, over the network.
    Network,
}

impl MethodChanges {
    /// Name of the state for the documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Session => "session",
            Self::Processes => "processes",
            Self::Files => "files",
            Self::Network => "network",
        }
    }
}

/// Files that a request changes, for the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileChange<'a> {
    /// Path of the file that is changed, copied or moved.
    pub path: &'a PathUri,
    /// Destination of a copy or move.
    pub to: Option<&'a PathUri>,
}

impl<'a> FileChange<'a> {
    fn at(path: &'a PathUri) -> Self {
        Self { path, to: None }
    }

    fn between(path: &'a PathUri, to: &'a PathUri) -> Self {
        Self { path, to: Some(to) }
    }
}

/// Row of the table.
#[derive(Debug)]
pub struct MethodRow {
    /// Name of the method on the wire.
    pub name: &'static str,
    /// Name of the method's group in handshake errors; `initialize`, which needs no handshake, has
    /// none.
    pub family: Option<&'static str>,
    /// A token needs one of these scopes; an empty list needs no scope. A single request can need a
    /// particular one of them, see [`ServedMethod::scopes`].
    pub scopes: &'static [Scope],
    /// State that requests may change.
    pub changes: MethodChanges,
    /// Whether the method is idempotent, so that a client may send a request again when the connection
    /// is lost before the response. `process/write` is idempotent because of its `writeId`. Open files
    /// and watches are not, because they belong to one connection.
    pub repeatable: bool,
    /// Extensions of the compatible wire: methods, notifications and fields (`method#field`).
    pub extensions: &'static [&'static str],
}

/// A method with a row in the table.
pub trait ServedMethod: Method {
    /// Row of the method.
    const ID: MethodId;

    /// Guarded names: an unknown member whose name is similar to one of these is rejected. If it
    /// were ignored as a spelling mistake, the request would do more than its sender meant to
    /// allow.
    const GUARDED: SafeMembers = EVERYWHERE;

    /// Decodes params. They must be an object; `null` is accepted for methods without params.
    ///
    /// # Errors
    ///
    /// When the params are not valid for the method.
    fn decode(raw: &str) -> serde_json::Result<Self::Params> {
        params::from_str(raw, Self::GUARDED)
    }

    /// Scopes for this request: a token needs one of them; an empty list needs no scope.
    fn scopes(_: &Self::Params) -> &'static [Scope] {
        Self::ID.row().scopes
    }

    /// Files that this request changes. Requests on a handle return none, because `fs/open` already
    /// named the file.
    fn file_change(_: &Self::Params) -> Option<FileChange<'_>> {
        None
    }
}

/// Guarded names of methods that start processes, including those of the first generation, which
/// have none of these members.
const STARTING: SafeMembers = &[
    "sandbox",
    "enforceManagedNetwork",
    "managedNetwork",
    "networkProxy",
    "envPolicy",
    "limits",
    "timeoutMs",
];

/// Guarded names of `http/request`.
const REQUESTING: SafeMembers = &[
    "sandbox",
    "enforceManagedNetwork",
    "managedNetwork",
    "networkProxy",
    "redirectPolicy",
    "timeoutMs",
];

/// Guarded names of methods that can refuse links.
pub(crate) const AT_PATHS: SafeMembers = &["sandbox", "followSymlinks"];

/// Defines the list of methods, their rows and the traits of their types. Items after `=>` override
/// those of [`ServedMethod`].
macro_rules! table {
    ($(
        $variant:ident: $method:ty = $wire:literal ($params:ty) -> $result:ty {
            family: $family:expr, scopes: $scopes:tt, changes: $changes:ident,
            repeatable: $repeatable:literal, extensions: $extensions:tt,
            $(=> $($function:tt)*)?
        }
    )*) => {
        /// Methods that servers handle, sorted by name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum MethodId {
            $(
                #[doc = concat!("`", $wire, "`.")]
                $variant,
            )*
        }

        impl MethodId {
            /// All methods, sorted by name.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];
        }

        const ROWS: &[MethodRow] = &[$(
            MethodRow {
                name: $wire,
                family: $family,
                scopes: &$scopes,
                changes: MethodChanges::$changes,
                repeatable: $repeatable,
                extensions: &$extensions,
            },
        )*];

        #[cfg(test)]
        impl MethodId {
            fn guarded(self) -> SafeMembers {
                match self {
                    $(Self::$variant => <$method>::GUARDED,)*
                }
            }

            /// Reason why params are rejected, if they are.
            fn refusal(self, raw: &str) -> Option<String> {
                match self {
                    $(Self::$variant => Some(<$method>::decode(raw).err()?.to_string()),)*
                }
            }
        }

        $(
            impl Method for $method {
                const NAME: &'static str = $wire;
                type Params = $params;
                type Result = $result;
            }

            impl ServedMethod for $method {
                const ID: MethodId = MethodId::$variant;
                $($($function)*)?
            }
        )*
    };
}

table! {
    CapabilityDiscoverV2: capability::DiscoverV2 = "capabilities/discoverV2" (capability::CatalogParams) -> capability::CatalogResult {
        family: Some("capability discovery"), scopes: [FsRead], changes: Nothing, repeatable: false,
        extensions: [],
    }
    CapabilityDiscoverV1: capability::DiscoverV1 = "capabilityRoots/discoverV1" (capability::DiscoverParams) -> capability::DiscoverResult {
        family: Some("capability discovery"), scopes: [FsRead], changes: Nothing, repeatable: false,
        extensions: [],
    }
    CommandExec: command::Exec = "command/exec" (command::ExecParams) -> command::ExecResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: false,
        extensions: ["command/exec", "command/exec/exited", "command/exec/outputDelta"],
        =>
        const GUARDED: SafeMembers = STARTING;
    }
    CommandTerminate: command::Terminate = "command/exec/terminate" (command::ExecTerminateParams) -> command::ExecTerminateResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: false,
        extensions: ["command/exec/terminate"],
    }
    CommandWrite: command::Write = "command/exec/write" (command::ExecWriteParams) -> command::ExecWriteResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: false,
        extensions: ["command/exec/write"],
    }
    EnvironmentInfo: environment::Info = "environment/info" (NoParams) -> environment::EnvironmentInfo {
        family: Some("environment info"), scopes: [], changes: Nothing, repeatable: true,
        extensions: [],
    }
    EnvironmentStatus: environment::Status = "environment/status" (NoParams) -> environment::StatusResult {
        family: Some("environment status"), scopes: [], changes: Nothing, repeatable: true,
        extensions: [],
    }
    EnvironmentConfigRead: environment::ConfigRead = "environmentConfig/read" (environment::ConfigReadParams) -> environment::ConfigReadResult {
        family: Some("environment config"), scopes: [FsRead], changes: Nothing, repeatable: false,
        extensions: [],
    }
    FsCanonicalize: fs::Canonicalize = "fs/canonicalize" (fs::CanonicalizeParams) -> fs::CanonicalizeResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: [],
    }
    FsClose: fs::Close = "fs/close" (fs::CloseParams) -> Empty {
        family: Some("filesystem"), scopes: [FsRead, FsWrite], changes: Files, repeatable: false,
        extensions: ["fs/close#commit"],
    }
    FsCopy: fs::Copy = "fs/copy" (fs::CopyParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: ["fs/copy#hardLink"],
        =>
        fn file_change(params: &fs::CopyParams) -> Option<FileChange<'_>> {
            Some(FileChange::between(&params.source_path, &params.destination_path))
        }
    }
    FsCreateDirectory: fs::CreateDirectory = "fs/createDirectory" (fs::CreateDirectoryParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: ["fs/createDirectory#createMode"],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
        fn file_change(params: &fs::CreateDirectoryParams) -> Option<FileChange<'_>> {
            Some(FileChange::at(&params.path))
        }
    }
    FsCreateSymlink: fs::CreateSymlink = "fs/createSymlink" (fs::CreateSymlinkParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: ["fs/createSymlink"],
        =>
        fn file_change(params: &fs::CreateSymlinkParams) -> Option<FileChange<'_>> {
            Some(FileChange::at(&params.path))
        }
    }
    FsGetMetadata: fs::GetMetadata = "fs/getMetadata" (fs::GetMetadataParams) -> fs::MetadataResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: [
            "fs/getMetadata#allocated", "fs/getMetadata#device", "fs/getMetadata#gid",
            "fs/getMetadata#hardLinks", "fs/getMetadata#inode", "fs/getMetadata#mode",
            "fs/getMetadata#symlinkTarget", "fs/getMetadata#uid",
        ],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
    }
    FsHash: fs::Hash = "fs/hash" (fs::HashParams) -> fs::HashResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: ["fs/hash"],
    }
    FsOpen: fs::Open = "fs/open" (fs::OpenParams) -> fs::OpenResult {
        family: Some("filesystem"), scopes: [FsRead, FsWrite], changes: Files, repeatable: false,
        extensions: [
            "fs/open#atomic", "fs/open#createMode", "fs/open#identity", "fs/open#update",
        ],
        =>
        fn scopes(params: &fs::OpenParams) -> &'static [Scope] {
            if params.mode.writes() { &[FsWrite] } else { &[FsRead] }
        }
        fn file_change(params: &fs::OpenParams) -> Option<FileChange<'_>> {
            params.mode.writes().then(|| FileChange::at(&params.path))
        }
    }
    FsReadBlock: fs::ReadBlock = "fs/readBlock" (fs::ReadBlockParams) -> fs::ReadBlockResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: false,
        extensions: [],
    }
    FsReadDirectory: fs::ReadDirectory = "fs/readDirectory" (fs::ReadDirectoryParams) -> fs::ReadDirectoryResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: [
            "fs/readDirectory#after", "fs/readDirectory#limit", "fs/readDirectory#links",
            "fs/readDirectory#metadata", "fs/readDirectory#next", "fs/readDirectory#path",
        ],
    }
    FsReadFile: fs::ReadFile = "fs/readFile" (fs::ReadFileParams) -> fs::ReadFileResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: [],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
    }
    FsRemove: fs::Remove = "fs/remove" (fs::RemoveParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: [],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
        fn file_change(params: &fs::RemoveParams) -> Option<FileChange<'_>> {
            Some(FileChange::at(&params.path))
        }
    }
    FsRename: fs::Rename = "fs/rename" (fs::RenameParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: ["fs/rename"],
        =>
        fn file_change(params: &fs::RenameParams) -> Option<FileChange<'_>> {
            Some(FileChange::between(&params.from, &params.to))
        }
    }
    FsSearch: fs::Search = "fs/search" (fs::SearchParams) -> fs::SearchResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: ["fs/search"],
    }
    FsSetMetadata: fs::SetMetadata = "fs/setMetadata" (fs::SetMetadataParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: true,
        extensions: ["fs/setMetadata", "fs/setMetadata#owner"],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
        fn file_change(params: &fs::SetMetadataParams) -> Option<FileChange<'_>> {
            Some(FileChange::at(&params.path))
        }
    }
    FsUnwatch: fs::Unwatch = "fs/unwatch" (fs::UnwatchParams) -> Empty {
        family: Some("filesystem"), scopes: [FsRead], changes: Session, repeatable: false,
        extensions: ["fs/unwatch"],
    }
    FsWalk: fs::Walk = "fs/walk" (fs::WalkParams) -> fs::WalkResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Nothing, repeatable: true,
        extensions: ["fs/walk#after", "fs/walk#limit", "fs/walk#next"],
    }
    FsWatch: fs::Watch = "fs/watch" (fs::WatchParams) -> fs::WatchResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Session, repeatable: false,
        extensions: ["fs/changed", "fs/watch"],
    }
    FsWatchMissing: fs::WatchMissing = "fs/watchMissing" (fs::WatchMissingParams) -> fs::WatchMissingResult {
        family: Some("filesystem"), scopes: [FsRead], changes: Session, repeatable: true,
        extensions: [],
    }
    FsWriteBlock: fs::WriteBlock = "fs/writeBlock" (fs::WriteBlockParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: false,
        extensions: [],
        =>
        fn decode(raw: &str) -> serde_json::Result<fs::WriteBlockParams> {
            fs::WriteBlockParams::decode(raw)
        }
    }
    FsWriteFile: fs::WriteFile = "fs/writeFile" (fs::WriteFileParams) -> Empty {
        family: Some("filesystem"), scopes: [FsWrite], changes: Files, repeatable: true,
        extensions: [
            "fs/writeFile#createMode", "fs/writeFile#mode", "fs/writeFile#modifiedAtMs",
            "fs/writeFile#owner",
        ],
        =>
        const GUARDED: SafeMembers = AT_PATHS;
        fn decode(raw: &str) -> serde_json::Result<fs::WriteFileParams> {
            fs::WriteFileParams::decode(raw)
        }
        fn file_change(params: &fs::WriteFileParams) -> Option<FileChange<'_>> {
            Some(FileChange::at(&params.path))
        }
    }
    HttpCancel: http::Cancel = "http/cancel" (http::CancelParams) -> http::CancelResult {
        family: Some("http"), scopes: [Exec], changes: Session, repeatable: false,
        extensions: ["http/cancel"],
    }
    HttpRequest: http::Request = "http/request" (http::RequestParams) -> http::RequestResult {
        family: Some("http"), scopes: [Exec], changes: Network, repeatable: false,
        extensions: ["http/request#decompress"],
        =>
        const GUARDED: SafeMembers = REQUESTING;
    }
    Initialize: session::Initialize = "initialize" (session::InitializeParams) -> session::InitializeResponse {
        family: None, scopes: [], changes: Session, repeatable: false,
        extensions: [
            "initialize#detachGraceMs", "initialize#resumeKey", "initialize#serverInstance",
        ],
    }
    ProcessCloseStdin: process::CloseStdin = "process/closeStdin" (process::CloseStdinParams) -> process::WriteResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: true,
        extensions: ["process/closeStdin"],
    }
    ProcessList: process::List = "process/list" (process::ListParams) -> process::ListResult {
        family: Some("exec"), scopes: [Observe], changes: Nothing, repeatable: true,
        extensions: ["process/list", "process/list#all"],
    }
    ProcessPauseOutput: process::PauseOutput = "process/pauseOutput" (process::PauseOutputParams) -> Empty {
        family: Some("exec"), scopes: [Exec], changes: Session, repeatable: false,
        extensions: ["process/pauseOutput"],
    }
    ProcessRead: process::Read = "process/read" (process::ReadParams) -> process::ReadResult {
        family: Some("exec"), scopes: [Observe], changes: Nothing, repeatable: true,
        extensions: ["process/read#evicted", "process/read#sessionId"],
    }
    ProcessResize: process::Resize = "process/resize" (process::ResizeParams) -> Empty {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: true,
        extensions: ["process/resize"],
    }
    ProcessSignal: process::Signal = "process/signal" (process::SignalParams) -> Empty {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: false,
        extensions: ["process/signal#scope", "process/signal#sessionId"],
    }
    ProcessSnapshot: process::Snapshot = "process/snapshot" (process::SnapshotParams) -> process::SnapshotResult {
        family: Some("exec"), scopes: [Observe], changes: Nothing, repeatable: true,
        extensions: ["process/snapshot", "process/snapshot#sessionId"],
    }
    ProcessStart: process::Start = "process/start" (process::StartParams) -> process::StartResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: false,
        extensions: [
            "process/closed#inheritedOutput", "process/exited#denials", "process/exited#usage",
            "process/start#delivery", "process/start#enforcement", "process/start#graceMs",
            "process/start#limits", "process/start#listDescendants", "process/start#size",
            "process/start#startId", "process/start#timeoutMs",
        ],
        =>
        const GUARDED: SafeMembers = STARTING;
    }
    ProcessTerminate: process::Terminate = "process/terminate" (process::TerminateParams) -> process::TerminateResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: true,
        extensions: [
            "process/terminate#mode", "process/terminate#sessionId", "process/terminate#wait",
        ],
    }
    ProcessWait: process::Wait = "process/wait" (process::WaitParams) -> process::WaitResult {
        family: Some("exec"), scopes: [Observe], changes: Nothing, repeatable: true,
        extensions: ["process/wait", "process/wait#sessionId"],
    }
    ProcessWaitFor: process::WaitFor = "process/waitFor" (process::WaitForParams) -> process::WaitForResult {
        family: Some("exec"), scopes: [Observe], changes: Nothing, repeatable: true,
        extensions: ["process/waitFor", "process/waitFor#sessionId"],
    }
    ProcessWrite: process::Write = "process/write" (process::WriteParams) -> process::WriteResult {
        family: Some("exec"), scopes: [Exec], changes: Processes, repeatable: true,
        extensions: [],
        =>
        fn decode(raw: &str) -> serde_json::Result<process::WriteParams> {
            process::WriteParams::decode(raw)
        }
    }
    SessionEnd: session::End = "session/end" (session::EndParams) -> Empty {
        family: Some("session"), scopes: [], changes: Session, repeatable: true,
        extensions: ["session/end", "session/end#graceMs"],
    }
}

impl MethodId {
    /// Returns the method with this name.
    pub fn of(name: &str) -> Option<Self> {
        let index = ROWS.binary_search_by(|row| row.name.cmp(name)).ok()?;
        Some(Self::ALL[index])
    }

    /// Row of the method.
    pub const fn row(self) -> &'static MethodRow {
        &ROWS[self as usize]
    }

    /// Returns an extension of this method, as `environment/info` lists it. In a constant, a name that
    /// is not in the row does not compile.
    ///
    /// # Panics
    ///
    /// If the name is not in the row.
    pub const fn extension(self, name: &str) -> &'static str {
        let listed = self.row().extensions;
        let mut at = 0;
        while at < listed.len() {
            if same(listed[at], name) {
                return listed[at];
            }
            at += 1;
        }
        panic!("the row of the method does not list this extension")
    }
}

/// Whether two texts are equal; can be used in constants.
const fn same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// The method that a request names.
#[derive(Debug, Clone, Copy)]
pub enum RequestedMethod<'a> {
    /// A method with a row.
    Served(MethodId),
    /// An unknown method.
    Unknown(&'a str),
}

impl<'a> RequestedMethod<'a> {
    /// Finds the method with this name.
    pub fn of(name: &'a str) -> Self {
        MethodId::of(name).map_or(Self::Unknown(name), Self::Served)
    }

    /// Name of the method on the wire.
    pub fn name(self) -> &'a str {
        match self {
            Self::Served(method) => method.row().name,
            Self::Unknown(name) => name,
        }
    }

    /// Scopes for any request of this name: a token needs one of them. Unknown names need the scope
    /// of the most powerful methods of the same group.
    pub fn scopes(self) -> &'static [Scope] {
        match self {
            Self::Served(method) => method.row().scopes,
            Self::Unknown(name) if name.starts_with("fs/") => &[FsWrite],
            Self::Unknown(_) => &[Exec],
        }
    }
}

/// Names of all extensions of the compatible wire, sorted.
pub fn extensions() -> Vec<&'static str> {
    let rows = MethodId::ALL.iter().map(|method| method.row());
    let mut names: Vec<_> = rows.flat_map(|row| row.extensions).copied().collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_and_found_by_name() {
        let names: Vec<_> = MethodId::ALL.iter().map(|id| id.row().name).collect();
        assert!(names.is_sorted_by(|one, next| one < next), "{names:?}");
        for (index, &id) in MethodId::ALL.iter().enumerate() {
            assert_eq!(id as usize, index);
            assert_eq!(MethodId::of(id.row().name), Some(id));
        }
        for name in ["", "fs/", "fs/open ", "FS/open", "network/policyRequest"] {
            assert_eq!(MethodId::of(name), None, "{name}");
        }
    }

    /// A client without extensions closes the connection at an unknown notification above 8 KiB.
    /// Therefore added notifications are sent only to clients that have called an added method.
    #[test]
    fn added_notifications_are_sent_only_to_clients_that_use_an_added_method() {
        let mut notifications = Vec::new();
        for id in MethodId::ALL {
            let row = id.row();
            for name in row.extensions {
                if name.contains('#') || MethodId::of(name).is_some() {
                    continue;
                }
                assert!(row.extensions.contains(&row.name), "{name} of {}", row.name);
                notifications.push(*name);
            }
        }
        notifications.sort_unstable();
        let expected = [
            "command/exec/exited",
            "command/exec/outputDelta",
            "fs/changed",
        ];
        assert_eq!(notifications, expected);
    }

    /// Names of the members of params in the compatible wire and its extensions, nested ones
    /// included.
    const NAMES: &str = "\
        afterSeq all allowLocalBinding any appVersion arg0 argv auditMetadata authMode bodyBase64 \
        caseSensitive chunk clientName cols commit configPaths contextLines count cpuSeconds \
        credentialMasking credentialProviders cwd dataBase64 debounceMs decompress delivery \
        destinationPath detachGraceMs domains enabled enableSocks5 enableSocks5Udp \
        enforceManagedNetwork env environmentId envPolicy exclude executionId exit fileBytes \
        followDirectorySymlinks followSymlinks force format from gitignore globs graceMs handleId \
        headers id identity ignore ignoreDefaultExcludes includeEvents includeOnly inherit keep \
        kept len length limits links loopbackPorts managedNetwork maxBytes maxDepth \
        maxDirectories maxEntries maxMatches memoryBytes metadata method missing mode \
        modifiedAtMs name networkProxy offset openFiles overwrite path patterns permissions \
        pipeStdin policyContext policyDecisionTimeoutMs port present processes processId proxy \
        pruneHiddenDirectories quietMs recordInput recursive redirectPolicy regex requestId \
        requirementsPaths resumeKey resumeSessionId retainMs reviewDomains role roots rows \
        sandbox sandboxOverride scope scopeId screen scrollbackLines serverInstance sessionId set \
        shell shellSnapshot signal size sourcePath startId stream streamResponse stripAnsi \
        takeover target temporaryDirectories threadId timeoutMs to toolCallId ttyRead tty \
        unixSockets until url useLegacyLandlock userHomeDir value valueEnvVar wait waitMs watchId \
        windowsSandboxLevel windowsSandboxPrivateDesktop windowsSandboxProxySettingsMode \
        workspaceRoots writeId";

    #[test]
    fn member_names_of_the_wire_are_never_reported_as_misspelt() {
        for id in MethodId::ALL {
            let name = id.row().name;
            for member in NAMES.split_whitespace() {
                let refusal = id
                    .refusal(&format!(r#"{{"{member}":null}}"#))
                    .unwrap_or_default();
                // Only members that are in the wrong place are rejected here; for methods without
                // params, all members are.
                if !refusal.contains("this method takes no params") {
                    let misplaced = id.guarded().contains(&member);
                    assert!(
                        misplaced || !refusal.contains("unknown field"),
                        "{name}: {refusal}"
                    );
                    assert!(!refusal.contains("did you mean"), "{name}: {refusal}");
                }
            }
        }
    }

    #[test]
    fn every_method_rejects_misspelt_policy_members() {
        for id in MethodId::ALL {
            for member in id.guarded() {
                for misspelt in [
                    format!("{member}s"),
                    member[1..].to_owned(),
                    member.to_uppercase(),
                ] {
                    let raw = format!(r#"{{"{misspelt}":null}}"#);
                    let refusal = id.refusal(&raw).unwrap_or_default();
                    let named = refusal.contains(&format!("`{misspelt}`"));
                    assert!(named, "{} took `{misspelt}`: {refusal}", id.row().name);
                }
            }
        }
    }

    #[test]
    fn params_of_every_method_are_an_object() {
        for id in MethodId::ALL {
            for raw in [
                "[]",
                "[null]",
                "0",
                "true",
                r#""text""#,
                r#"[["a"], "b", {}]"#,
            ] {
                assert!(id.refusal(raw).is_some(), "{} took {raw}", id.row().name);
            }
        }
    }

    #[test]
    fn extensions_are_listed_once() {
        let listed = extensions();
        assert!(listed.is_sorted_by(|one, next| one < next), "{listed:?}");
        for name in ["process/start#limits", "fs/changed", "session/end"] {
            assert!(listed.contains(&name), "{name}");
        }
        assert!(listed.len() > 50, "{listed:?}");
    }

    #[test]
    fn methods_that_change_files_or_processes_require_the_scope_for_it() {
        for id in MethodId::ALL {
            let row = id.row();
            let needs = |scope| row.scopes.contains(&scope);
            match row.changes {
                MethodChanges::Files => assert!(needs(FsWrite), "{}", row.name),
                MethodChanges::Processes | MethodChanges::Network => {
                    assert_eq!(row.scopes, [Exec], "{}", row.name)
                }
                MethodChanges::Nothing | MethodChanges::Session => {
                    assert!(!needs(FsWrite), "{}", row.name)
                }
            }
        }
    }
}
