//! The table of methods: from a name and raw params to a function.

use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::session::{self, Initialized};
use exec_server_protocol::{
    Method, Notification as _, capability, command, environment, fs, http, process,
};

use crate::connection::{Connection, Phase, Responder};
use crate::error::RpcError;
use crate::{methods, scope};

/// What this server adds to the compatible wire, as told by `environment/info`.
pub(crate) const EXTENSIONS: &[&str] = &[
    "command/exec",
    "command/exec/exited",
    "command/exec/outputDelta",
    "command/exec/terminate",
    "command/exec/write",
    "fs/changed",
    "fs/close#commit",
    "fs/createSymlink",
    "fs/getMetadata#gid",
    "fs/getMetadata#inode",
    "fs/getMetadata#mode",
    "fs/getMetadata#symlinkTarget",
    "fs/getMetadata#uid",
    "fs/hash",
    "fs/open#atomic",
    "fs/open#identity",
    "fs/open#update",
    "fs/readDirectory#links",
    "fs/readDirectory#path",
    "fs/rename",
    "fs/search",
    "fs/setMetadata",
    "fs/unwatch",
    "fs/watch",
    "fs/writeFile#mode",
    "fs/writeFile#modifiedAtMs",
    "http/cancel",
    "http/request#decompress",
    "initialize#detachGraceMs",
    "initialize#resumeKey",
    "process/closeStdin",
    "process/closed#inheritedOutput",
    "process/exited#denials",
    "process/exited#usage",
    "process/list",
    "process/list#all",
    "process/read#evicted",
    "process/read#sessionId",
    "process/resize",
    "process/signal#scope",
    "process/signal#sessionId",
    "process/snapshot",
    "process/snapshot#sessionId",
    "process/start#delivery",
    "process/start#enforcement",
    "process/start#graceMs",
    "process/start#limits",
    "process/start#size",
    "process/start#startId",
    "process/start#timeoutMs",
    "process/terminate#mode",
    "process/terminate#sessionId",
    "process/terminate#wait",
    "process/wait",
    "process/wait#sessionId",
    "process/waitFor",
    "process/waitFor#sessionId",
    "session/end",
];

/// Methods of the compatible wire that this server does not offer: refused like any unknown one,
/// but only after the handshake has been checked.
const NOT_OFFERED: &[(&str, &str)] = &[("capabilities/discoverV2", "capability discovery")];

/// One request on its way to its function.
pub(crate) struct Call<'a> {
    pub(crate) connection: &'a Arc<Connection>,
    pub(crate) phase: &'a mut Phase,
    pub(crate) responder: Responder,
    pub(crate) params: Option<&'a str>,
    /// What they lie in, if that can be kept.
    pub(crate) shared: Option<&'a Bytes>,
}

/// Finds the method and calls it.
pub(crate) fn request(
    connection: &Arc<Connection>,
    phase: &mut Phase,
    method: &str,
    (params, shared): (Option<&str>, Option<&Bytes>),
    responder: Responder,
) {
    if let Err(error) = scope::check(&connection.identity, method, params) {
        return responder.send_error(error);
    }
    if let Some(audit) = connection.server.audit()
        && scope::changes_files(method, params)
    {
        audit.changed(&connection.identity, method, params);
    }
    let call = Call {
        connection,
        phase,
        responder,
        params,
        shared,
    };
    match method {
        session::Initialize::NAME => {
            call.plain::<session::Initialize>(methods::session::initialize)
        }
        session::End::NAME => call.plain::<session::End>(methods::session::end),

        environment::Info::NAME => call.plain::<environment::Info>(methods::environment::info),
        environment::Status::NAME => {
            call.plain::<environment::Status>(methods::environment::status);
        }
        environment::ConfigRead::NAME => {
            call.plain::<environment::ConfigRead>(methods::environment::config_read);
        }

        capability::DiscoverV1::NAME => {
            call.plain::<capability::DiscoverV1>(methods::capability::discover_v1);
        }

        process::Start::NAME => call.plain::<process::Start>(methods::process::start),
        process::Read::NAME => call.plain::<process::Read>(methods::process::read),
        process::Write::NAME => call.decoded(
            process::WriteParams::decode,
            process::Write::NAME,
            methods::process::write,
        ),
        process::CloseStdin::NAME => {
            call.plain::<process::CloseStdin>(methods::process::close_stdin);
        }
        process::Resize::NAME => call.plain::<process::Resize>(methods::process::resize),
        process::Signal::NAME => call.plain::<process::Signal>(methods::process::signal),
        process::Terminate::NAME => call.plain::<process::Terminate>(methods::process::terminate),
        process::Wait::NAME => call.plain::<process::Wait>(methods::process::wait),
        process::WaitFor::NAME => call.plain::<process::WaitFor>(methods::process::wait_for),
        process::Snapshot::NAME => call.plain::<process::Snapshot>(methods::process::snapshot),
        process::List::NAME => call.plain::<process::List>(methods::process::list),

        command::Exec::NAME => call.plain::<command::Exec>(methods::command::exec),
        command::Write::NAME => call.plain::<command::Write>(methods::command::write),
        command::Terminate::NAME => call.plain::<command::Terminate>(methods::command::terminate),

        fs::ReadFile::NAME => call.plain::<fs::ReadFile>(methods::fs::read_file),
        fs::WriteFile::NAME => call.decoded(
            fs::WriteFileParams::decode,
            fs::WriteFile::NAME,
            methods::fs::write_file,
        ),
        fs::GetMetadata::NAME => call.plain::<fs::GetMetadata>(methods::fs::get_metadata),
        fs::CreateDirectory::NAME => {
            call.plain::<fs::CreateDirectory>(methods::fs::create_directory);
        }
        fs::Canonicalize::NAME => call.plain::<fs::Canonicalize>(methods::fs::canonicalize),
        fs::ReadDirectory::NAME => call.plain::<fs::ReadDirectory>(methods::fs::read_directory),
        fs::Walk::NAME => call.plain::<fs::Walk>(methods::fs::walk),
        fs::Remove::NAME => call.plain::<fs::Remove>(methods::fs::remove),
        fs::Copy::NAME => call.plain::<fs::Copy>(methods::fs::copy),
        fs::Rename::NAME => call.plain::<fs::Rename>(methods::fs::rename),
        fs::SetMetadata::NAME => call.plain::<fs::SetMetadata>(methods::fs::set_metadata),
        fs::CreateSymlink::NAME => call.plain::<fs::CreateSymlink>(methods::fs::create_symlink),
        fs::Hash::NAME => call.plain::<fs::Hash>(methods::fs::hash),
        fs::Open::NAME => call.plain::<fs::Open>(methods::handle::open),
        fs::ReadBlock::NAME => call.plain::<fs::ReadBlock>(methods::handle::read_block),
        fs::WriteBlock::NAME => methods::handle::write_block(call),
        fs::Close::NAME => call.plain::<fs::Close>(methods::handle::close),
        fs::Watch::NAME => call.plain::<fs::Watch>(methods::watch::watch),
        fs::Unwatch::NAME => call.plain::<fs::Unwatch>(methods::watch::unwatch),
        fs::WatchMissing::NAME => {
            call.plain::<fs::WatchMissing>(methods::watch::watch_missing);
        }
        fs::Search::NAME => call.plain::<fs::Search>(methods::search::search),

        http::Request::NAME => call.plain::<http::Request>(methods::http::request),
        http::Cancel::NAME => call.plain::<http::Cancel>(methods::http::cancel),

        other => {
            let known = NOT_OFFERED.iter().find(|(name, _)| *name == other);
            let gate = known.map_or(Ok(()), |(_, family)| call.phase.ready(family).map(|_| ()));
            let error = gate
                .err()
                .unwrap_or_else(|| RpcError::method_not_found(other));
            call.responder.send_error(error);
        }
    }
}

/// Takes a notification; an error is told to the peer, which may go on.
pub(crate) fn notification(phase: &mut Phase, method: &str) -> Result<(), String> {
    if method != Initialized::NAME {
        return Err(format!("unexpected notification `{method}`"));
    }
    match std::mem::take(phase) {
        Phase::New => Err("client must call initialize before sending initialized".to_owned()),
        Phase::Initialized(session) | Phase::Ready(session) => {
            *phase = Phase::Ready(session);
            Ok(())
        }
    }
}

impl Call<'_> {
    /// Decodes the params and calls `function`, which answers by itself.
    fn plain<M: Method>(self, function: impl FnOnce(Self, M::Params)) {
        self.decoded(|raw| serde_json::from_str(raw), M::NAME, function);
    }

    pub(crate) fn decoded<P>(
        self,
        decode: fn(&str) -> serde_json::Result<P>,
        name: &str,
        function: impl FnOnce(Self, P),
    ) {
        match decode(self.params.unwrap_or("null")) {
            Ok(params) => function(self, params),
            Err(error) => {
                let message = format!("invalid params for `{name}`: {error}");
                self.responder.send_error(RpcError::invalid_params(message));
            }
        }
    }
}
