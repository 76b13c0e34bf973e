//! Request dispatch: checks scope, params and handshake, writes the audit log and calls the method.
//!
//! The requirements of each method are in its row of [`table`](exec_server_protocol::table). Params
//! are decoded once, and authorization is decided on the decoded value that the method gets.

use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::fs::FsMethod;
use exec_server_protocol::session::{self, Initialized};
use exec_server_protocol::table::RequestedMethod;
use exec_server_protocol::{
    MethodId, NotificationMethod as _, ServedMethod, capability, command, environment, fs, http,
    process,
};

use crate::ApiError;
use crate::connection::{Connection, HandshakePhase};
use crate::responder::RequestResponder;
use crate::session::Session;
use crate::{methods, scope};

/// A request that has passed the checks of scope and handshake.
pub(crate) struct CheckedRequest<'a> {
    pub(crate) connection: &'a Arc<Connection>,
    pub(crate) session: Arc<Session>,
    pub(crate) responder: RequestResponder,
}

/// The undecoded params of a request.
#[derive(Clone, Copy)]
pub(crate) struct RawParams<'a> {
    /// The JSON text, if the request has params.
    pub(crate) text: Option<&'a str>,
    /// The buffer that contains the text, if it can be kept.
    pub(crate) shared: Option<&'a Bytes>,
}

/// A request whose params are not decoded yet.
struct UndecodedRequest<'a> {
    method: MethodId,
    connection: &'a Arc<Connection>,
    phase: &'a mut HandshakePhase,
    params: RawParams<'a>,
    responder: RequestResponder,
}

/// Checks a request and calls the function of its method.
///
/// The scope is checked first, so that a client without the scope gets no other information.
/// Unknown methods and invalid params are refused before the handshake is checked.
pub(crate) fn request(
    connection: &Arc<Connection>,
    phase: &mut HandshakePhase,
    named: RequestedMethod<'_>,
    params: RawParams<'_>,
    responder: RequestResponder,
) {
    // Checks the scopes of the method before the params are decoded, so that a client without them
    // causes no further work.
    if let Err(error) = scope::check(&connection.identity, named.name(), named.scopes()) {
        return responder.send_error(error);
    }
    let method = match named {
        RequestedMethod::Served(method) => method,
        RequestedMethod::Unknown(name) => {
            return responder.send_error(ApiError::method_not_found(name));
        }
    };
    let undecoded = UndecodedRequest {
        method,
        connection,
        phase,
        params,
        responder,
    };
    dispatch(undecoded);
}

/// Calls the function of the method.
fn dispatch(undecoded: UndecodedRequest<'_>) {
    match undecoded.method {
        MethodId::Initialize => undecoded.initialize(),
        MethodId::SessionEnd => undecoded.end_session(),
        MethodId::FsWriteBlock => undecoded.write_block(),
        MethodId::CapabilityDiscoverV1 => {
            undecoded.run::<capability::DiscoverV1>(methods::capability::discover_v1)
        }
        MethodId::CapabilityDiscoverV2 => {
            undecoded.run::<capability::DiscoverV2>(methods::capability::discover_v2)
        }
        MethodId::CommandExec => undecoded.run::<command::Exec>(methods::command::exec),
        MethodId::CommandTerminate => {
            undecoded.run::<command::Terminate>(methods::command::terminate)
        }
        MethodId::CommandWrite => undecoded.run::<command::Write>(methods::command::write),
        MethodId::EnvironmentInfo => undecoded.run::<environment::Info>(methods::environment::info),
        MethodId::EnvironmentStatus => {
            undecoded.run::<environment::Status>(methods::environment::status)
        }
        MethodId::EnvironmentConfigRead => {
            undecoded.run::<environment::ConfigRead>(methods::environment::config_read)
        }
        MethodId::FsCanonicalize => undecoded.run_file::<fs::Canonicalize>(),
        MethodId::FsClose => undecoded.run::<fs::Close>(methods::handle::close),
        MethodId::FsCopy => undecoded.run_file::<fs::Copy>(),
        MethodId::FsCreateDirectory => undecoded.run_file::<fs::CreateDirectory>(),
        MethodId::FsCreateSymlink => undecoded.run_file::<fs::CreateSymlink>(),
        MethodId::FsGetMetadata => undecoded.run_file::<fs::GetMetadata>(),
        MethodId::FsHash => undecoded.run_file::<fs::Hash>(),
        MethodId::FsOpen => undecoded.run::<fs::Open>(methods::handle::open),
        MethodId::FsReadBlock => undecoded.run::<fs::ReadBlock>(methods::handle::read_block),
        MethodId::FsReadDirectory => undecoded.run_file::<fs::ReadDirectory>(),
        MethodId::FsReadFile => undecoded.run_file::<fs::ReadFile>(),
        MethodId::FsRemove => undecoded.run_file::<fs::Remove>(),
        MethodId::FsRename => undecoded.run_file::<fs::Rename>(),
        MethodId::FsSearch => undecoded.run_file::<fs::Search>(),
        MethodId::FsSetMetadata => undecoded.run_file::<fs::SetMetadata>(),
        MethodId::FsUnwatch => undecoded.run::<fs::Unwatch>(methods::watch::unwatch),
        MethodId::FsWalk => undecoded.run_file::<fs::Walk>(),
        MethodId::FsWatch => undecoded.run::<fs::Watch>(methods::watch::watch),
        MethodId::FsWatchMissing => {
            undecoded.run::<fs::WatchMissing>(methods::watch::watch_missing)
        }
        MethodId::FsWriteFile => undecoded.run_file::<fs::WriteFile>(),
        MethodId::HttpCancel => undecoded.run::<http::Cancel>(methods::http::cancel),
        MethodId::HttpRequest => undecoded.run::<http::Request>(methods::http::request),
        MethodId::ProcessCloseStdin => {
            undecoded.run::<process::CloseStdin>(methods::process::close_stdin)
        }
        MethodId::ProcessList => undecoded.run::<process::List>(methods::process::list),
        MethodId::ProcessPauseOutput => {
            undecoded.run::<process::PauseOutput>(methods::process::pause_output)
        }
        MethodId::ProcessRead => undecoded.run::<process::Read>(methods::process::read),
        MethodId::ProcessResize => undecoded.run::<process::Resize>(methods::process::resize),
        MethodId::ProcessSignal => undecoded.run::<process::Signal>(methods::process::signal),
        MethodId::ProcessSnapshot => undecoded.run::<process::Snapshot>(methods::process::snapshot),
        MethodId::ProcessStart => undecoded.run::<process::Start>(methods::process::start),
        MethodId::ProcessTerminate => {
            undecoded.run::<process::Terminate>(methods::process::terminate)
        }
        MethodId::ProcessWait => undecoded.run::<process::Wait>(methods::process::wait),
        MethodId::ProcessWaitFor => undecoded.run::<process::WaitFor>(methods::process::wait_for),
        MethodId::ProcessWrite => undecoded.run::<process::Write>(methods::process::write),
    }
}

impl<'a> UndecodedRequest<'a> {
    fn initialize(self) {
        match self.decode::<session::Initialize>() {
            Ok(params) => {
                methods::session::initialize(self.connection, self.phase, self.responder, &params);
            }
            Err(error) => self.responder.send_error(error),
        }
    }

    fn end_session(self) {
        match self.decode::<session::End>() {
            Ok(params) => self.admit::<session::End>(params, |call, phase, params| {
                methods::session::end(call, phase, params);
            }),
            Err(error) => self.responder.send_error(error),
        }
    }

    fn write_block(self) {
        match methods::handle::long_block(self.params) {
            Some((likely, raw)) => self.admit::<fs::WriteBlock>(likely, |call, _, likely| {
                methods::handle::write_long_block(call, &likely, raw);
            }),
            None => self.run::<fs::WriteBlock>(methods::handle::write_block),
        }
    }

    /// Decodes the params and calls `function`, which sends the response.
    fn run<M: ServedMethod>(self, function: impl FnOnce(CheckedRequest<'a>, M::Params)) {
        match self.decode::<M>() {
            Ok(params) => self.admit::<M>(params, |call, _, params| function(call, params)),
            Err(error) => self.responder.send_error(error),
        }
    }

    /// Runs a file operation that has one request and one response.
    fn run_file<M: ServedMethod + FsMethod>(self) {
        self.run::<M>(methods::fs::call::<M>);
    }

    /// Decodes the params and checks the scope that they require.
    fn decode<M: ServedMethod>(&self) -> Result<M::Params, ApiError> {
        debug_assert_eq!(self.method, M::ID, "another method's function");
        let text = self.params.text.unwrap_or("null");
        let params = M::decode(text).map_err(|error| {
            let field = failed_member(text, &error).map(|name| format!("`{name}`: "));
            let field = field.unwrap_or_default();
            ApiError::invalid_params(format!("invalid params for `{}`: {field}{error}", M::NAME))
        })?;
        scope::check(&self.connection.identity, M::NAME, M::scopes(&params))?;
        Ok(params)
    }

    /// Checks the handshake, writes to the audit log and calls `function`.
    fn admit<M: ServedMethod>(
        self,
        params: M::Params,
        function: impl FnOnce(CheckedRequest<'a>, &mut HandshakePhase, M::Params),
    ) {
        let session = match self.phase.ready(M::ID.row().family.unwrap_or_default()) {
            Ok(session) => session,
            Err(error) => return self.responder.send_error(error),
        };
        if let Some(audit) = self.connection.server.audit()
            && let Some(change) = M::file_change(&params)
        {
            audit.changed(&self.connection.identity, M::NAME, change);
        }
        let call = CheckedRequest {
            connection: self.connection,
            session,
            responder: self.responder,
        };
        function(call, self.phase, params);
    }
}

/// Handles a notification. The caller reports an error to the peer; the connection stays open.
pub(crate) fn notification(phase: &mut HandshakePhase, method: &str) -> Result<(), String> {
    if method != Initialized::NAME {
        return Err(format!("unexpected notification `{method}`"));
    }
    match std::mem::take(phase) {
        HandshakePhase::New => {
            Err("client must call initialize before sending initialized".to_owned())
        }
        HandshakePhase::Initialized(session) | HandshakePhase::Ready(session) => {
            *phase = HandshakePhase::Ready(session);
            Ok(())
        }
    }
}

/// The path of the member whose value could not be decoded, as in `envPolicy.inherit`; `None` if the
/// error is not about a value, or names a member itself.
fn failed_member(text: &str, error: &serde_json::Error) -> Option<String> {
    // What is missing is named by the error, and has no place in the text.
    if !error.is_data() || error.line() != 1 || error.to_string().contains("missing field") {
        return None;
    }
    // Of each object or list that is open at the error: the member that is being read.
    let mut open: Vec<Option<&str>> = Vec::new();
    let end = error.column().min(text.len());
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < end {
        match bytes[at] {
            b'{' | b'[' => open.push(None),
            b'}' | b']' => {
                open.pop();
            }
            b',' if bytes.get(at + 1..).is_some_and(|rest| !rest.is_empty()) => {
                if let Some(member) = open.last_mut() {
                    *member = None;
                }
            }
            b'"' => {
                let start = at + 1;
                at = start;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                let rest = text.get(at + 1..).unwrap_or_default().trim_start();
                if rest.starts_with(':')
                    && let Some(member) = open.last_mut()
                {
                    *member = text.get(start..at);
                }
            }
            _ => {}
        }
        at += 1;
    }
    let names: Vec<&str> = open.into_iter().flatten().collect();
    let name = names.join(".");
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (!name.is_empty() && name.len() <= 64 && name.bytes().all(is_plain)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_member_that_cannot_be_decoded() {
        use exec_server_protocol::process::StartParams;
        for (text, expected) in [
            (
                r#"{"processId":"p","argv":["a"],"cwd":"/tmp","env":{},"tty":false}"#,
                Some("cwd"),
            ),
            (
                r#"{"processId":"p","argv":["a",1],"cwd":"file:///","env":{},"tty":false}"#,
                Some("argv"),
            ),
            (
                r#"{"processId":"p","argv":[],"cwd":"file:///","env":{"A":1},"tty":false}"#,
                Some("env.A"),
            ),
            (
                r#"{"processId":"p","argv":[],"cwd":"file:///","env":{},"tty":"no"}"#,
                Some("tty"),
            ),
            (
                r#"{"processId":"p","argv":[],"cwd":"file:///","env":{},"envPolicy":{"inherit":"most"}}"#,
                Some("envPolicy.inherit"),
            ),
            (
                r#"{"processId":"p","argv":[],"cwd":"file:///","env":{}}"#,
                None,
            ),
            (r#"[1]"#, None),
        ] {
            let error = serde_json::from_str::<StartParams>(text).unwrap_err();
            assert_eq!(
                failed_member(text, &error).as_deref(),
                expected,
                "{text}: {error}"
            );
        }
    }
}
