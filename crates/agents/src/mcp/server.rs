//! MCP server: handles the protocol and dispatches calls to tools.
//!
//! Owns the list of tools, the limit of simultaneous calls, progress and cancellation, and the
//! resources. The tools are implemented in `tools`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
    Implementation, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, Resource, ResourceContents, ResourceTemplate,
    ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ServerHandler, serve_server};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::mcp::definitions::{TOOLS, tool};
use crate::mcp::environment::{ToolEnvironment, ToolEnvironmentError, ToolEnvironments};
use crate::mcp::tools::{self, ToolError, ToolOutcome};
use crate::unified::{SessionInfo, UnifiedExec, UnifiedExecConfig};

/// Maximum number of simultaneous calls. A model makes a few; more come from a faulty client.
const MAX_CALLS: usize = 64;

/// Interval of progress notifications to a client that asked for them.
const PROGRESS: Duration = Duration::from_secs(1);

/// Number of ended commands whose output can still be read.
const FINISHED_SESSIONS: usize = 64;

/// Bytes of output kept for each command.
const TRANSCRIPT_BYTES: usize = 256 * 1024;

/// Options of an MCP server.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct McpOptions {
    /// The tools to offer; all if absent.
    pub tools: Option<BTreeSet<String>>,
}

/// MCP server over environments; cheap to clone, and all clones share their commands.
#[derive(Debug, Clone)]
pub struct McpServer {
    shared: Arc<McpShared>,
}

/// State shared by all clones.
#[derive(Debug)]
pub(crate) struct McpShared {
    pub(crate) environments: Arc<dyn ToolEnvironments>,
    pub(crate) unified: UnifiedExec,
    options: McpOptions,
    /// One permit for each call in progress.
    calls: Semaphore,
}

/// One call of a tool.
#[derive(Debug, Clone)]
pub(crate) struct ToolCall {
    pub(crate) shared: Arc<McpShared>,
    /// Id of the call, unique in this server. The ids of the commands that the call starts begin
    /// with it.
    pub(crate) id: String,
    /// Cancelled when the client cancels the request.
    pub(crate) cancelled: CancellationToken,
}

impl ToolCall {
    /// Returns the environment with the given id, or the default one, with its id.
    pub(crate) async fn environment(
        &self,
        id: Option<&str>,
    ) -> Result<(String, Arc<ToolEnvironment>), ToolEnvironmentError> {
        let environments = &self.shared.environments;
        let id = match id {
            Some(id) => id.to_owned(),
            None => environments.ids().into_iter().next().unwrap_or_default(),
        };
        let environment = environments.get(&id).await?;
        Ok((id, environment))
    }

    /// Id of the command that this call starts: the id of the call and the environment.
    pub(crate) fn command_id(&self, environment: &str) -> String {
        format!("{} {environment}", self.id)
    }
}

/// The environment in which a command was started.
pub(crate) fn environment_of(session: &SessionInfo) -> &str {
    session.call_id.split_once(' ').map_or("", |(_, id)| id)
}

impl McpServer {
    /// Creates a server. Its commands end when the last clone is dropped.
    pub fn new(environments: Arc<dyn ToolEnvironments>, options: McpOptions) -> Self {
        let config = UnifiedExecConfig {
            finished_sessions: FINISHED_SESSIONS,
            transcript_bytes: TRANSCRIPT_BYTES,
            ..UnifiedExecConfig::default()
        };
        Self {
            shared: Arc::new(McpShared {
                environments,
                unified: UnifiedExec::new(config),
                options,
                calls: Semaphore::new(MAX_CALLS),
            }),
        }
    }

    /// Ends all commands and their descendants.
    pub async fn shutdown(&self) {
        self.shared.unified.shutdown().await;
    }

    fn offers(&self, name: &str) -> bool {
        let chosen = self.shared.options.tools.as_ref();
        TOOLS.contains(&name) && chosen.is_none_or(|chosen| chosen.contains(name))
    }

    fn tools(&self) -> Vec<Tool> {
        let several = self.shared.environments.ids().len() > 1;
        TOOLS
            .iter()
            .filter(|name| self.offers(name))
            .map(|name| tool(name, several))
            .collect()
    }

    async fn work(
        &self,
        request: CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        if !self.offers(&request.name) {
            let message = format!("unknown tool: {}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        }
        let Ok(_permit) = self.shared.calls.try_acquire() else {
            let message = format!("limit of {MAX_CALLS} calls at the same time reached");
            return Err(ErrorData::internal_error(message, None));
        };
        let call = ToolCall {
            shared: Arc::clone(&self.shared),
            id: uuid::Uuid::new_v4().to_string(),
            cancelled: context.ct.clone(),
        };
        let id = call.id.clone();
        let arguments = request.arguments.unwrap_or_default();
        let work = tools::call(call, request.name, arguments);
        let done = self.with_progress(&id, context, work).await;
        match done {
            Ok(ToolOutcome { text, structured }) => {
                let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
                result.structured_content = Some(structured);
                Ok(result)
            }
            // A result for the model, which can correct the call; clients do not show it protocol
            // errors.
            Err(ToolError(message)) => Ok(CallToolResult::error(vec![ContentBlock::text(message)])),
        }
    }

    /// Sends progress notifications, if the client asked for them, until the call ends.
    async fn with_progress<R>(
        &self,
        id: &str,
        context: &RequestContext<RoleServer>,
        work: impl Future<Output = R>,
    ) -> R {
        let Some(token) = context.meta.get_progress_token() else {
            return work.await;
        };
        tokio::pin!(work);
        let began = Instant::now();
        let mut ticks = tokio::time::interval_at(began + PROGRESS, PROGRESS);
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = ticks.tick() => {}
            }
            let seconds = began.elapsed().as_secs_f64();
            let mut message = format!("running for {seconds:.0} s");
            if let Some(session) = self.started_by(id) {
                message += &format!(", {} bytes of output", session.output_bytes);
            }
            let notification =
                ProgressNotificationParam::new(token.clone(), seconds).with_message(message);
            // A client that does not read notifications must not delay the result.
            tokio::select! {
                done = &mut work => return done,
                _ = context.peer.notify_progress(notification) => {}
            }
        }
    }

    fn started_by(&self, id: &str) -> Option<SessionInfo> {
        let sessions = self.shared.unified.sessions();
        let mut sessions = sessions.into_iter();
        sessions.find(|session| session.call_id.starts_with(id))
    }
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources()
            .build();
        let mut instructions = "Runs commands and uses files of a machine. exec_command returns when \
            the command has ended, or with a session_id when its time is up; then wait_for waits for \
            a line, a port or the end, write_stdin types or returns more output, read_output returns \
            any part of the output, and kill ends it. Relative paths start at the working directory. \
            A result that was cut names the call that returns the rest."
            .to_owned();
        if let Some(policy) = self.shared.environments.policy() {
            instructions += &format!(" {policy}");
        }
        let ids = self.shared.environments.ids();
        if ids.len() > 1 {
            instructions += &format!(
                " There are several environments: {}; without an environment_id the first is used.",
                ids.join(", ")
            );
        }
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new(
                "exec-server",
                env!("CARGO_PKG_VERSION"),
            ))
            .with_instructions(instructions)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        let several = self.shared.environments.ids().len() > 1;
        self.offers(name).then(|| tool(name, several))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        Ok(self.work(request, &context).await?.into())
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let sessions = self.shared.unified.sessions();
        let logs = sessions.iter().map(|session| {
            Resource::new(
                log_uri(session.session_id),
                format!("log of {}", session.session_id),
            )
            .with_description(session.argv.last().cloned().unwrap_or_default())
            .with_mime_type("text/plain")
        });
        Ok(ListResourcesResult::with_all_items(logs.collect()))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let log = ResourceTemplate::new(format!("{LOG_SCHEME}{{session_id}}{LOG_END}"), "log")
            .with_description("Head and tail of everything that a command wrote")
            .with_mime_type("text/plain");
        Ok(ListResourceTemplatesResult::with_all_items(vec![log]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let session = request
            .uri
            .strip_prefix(LOG_SCHEME)
            .and_then(|rest| rest.strip_suffix(LOG_END)?.parse().ok());
        let log = session.and_then(|session| self.shared.unified.transcript(session));
        match log {
            Some(log) => {
                let contents = ResourceContents::text(log.text(), request.uri);
                Ok(ReadResourceResult::new(vec![contents]).into())
            }
            None => {
                let message = format!("no such resource: {}", request.uri);
                Err(ErrorData::resource_not_found(message, None))
            }
        }
    }
}

const LOG_SCHEME: &str = "exec-server://process/";
const LOG_END: &str = "/log";

/// URI of the log of a session.
pub(crate) fn log_uri(session: u32) -> String {
    format!("{LOG_SCHEME}{session}{LOG_END}")
}

/// Serves one client on standard input and output until the client closes its side.
///
/// # Errors
///
/// If the client does not complete the MCP handshake.
pub async fn serve_stdio(server: McpServer) -> std::io::Result<()> {
    let transport = rmcp::transport::stdio_pipes();
    let outcome = serve_server(server.clone(), transport).await;
    let result = match outcome {
        Ok(running) => running
            .waiting()
            .await
            .map(drop)
            .map_err(std::io::Error::other),
        Err(error) => Err(std::io::Error::other(error)),
    };
    server.shutdown().await;
    result
}
