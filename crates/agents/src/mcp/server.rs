//! MCP server: handles the protocol and dispatches calls to tools.
//!
//! Owns the list of tools, the limit of simultaneous calls, progress and cancellation, and the
//! resources. The tools are implemented in `tools`.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rmcp::handler::server::common::schema_for_type;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
    Implementation, JsonObject, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, Resource, ResourceContents, ResourceTemplate,
    ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::schemars::JsonSchema;
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ServerHandler, serve_server};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::mcp::environment::{ToolEnvironment, ToolEnvironmentError, ToolEnvironments};
use crate::mcp::params;
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

/// Names of all tools.
pub const TOOLS: &[&str] = &[
    "exec_command",
    "write_stdin",
    "read_output",
    "kill",
    "list_processes",
    "wait_for",
    "read_file",
    "write_file",
    "edit",
    "list_dir",
    "search",
    "watch_once",
];

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
            Err(ToolError::Arguments(message)) => Err(ErrorData::invalid_params(message, None)),
            // A failed tool call is a result for the model, not a protocol error.
            Err(ToolError::Failed(message)) => {
                Ok(CallToolResult::error(vec![ContentBlock::text(message)]))
            }
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
        let mut instructions = "Runs commands and uses files. exec_command answers when the command \
            has ended, or with a session_id when its time is up: then write_stdin writes to it or \
            waits for more, wait_for waits for a line, a port, silence or a question, and kill ends \
            it. Relative paths begin at the working directory."
            .to_owned();
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

/// Definition of a tool. `environment_id` is a parameter only if there are several environments.
fn tool(name: &str, several: bool) -> Tool {
    fn of<P: JsonSchema + 'static>() -> Arc<JsonObject> {
        schema_for_type::<P>()
    }
    let reads = ToolAnnotations::new().read_only(true).open_world(false);
    let writes = ToolAnnotations::new().read_only(false).open_world(false);
    let (description, schema, annotations) = match name {
        "exec_command" => (
            "Run a command in a shell. Answers with its output and exit code when it has ended, or \
             with a session_id when it is still running after yield_time_ms.",
            of::<params::ExecCommandParams>(),
            writes.destructive(true).open_world(true),
        ),
        "write_stdin" => (
            "Write to a running command that has a terminal, or wait for more of its output.",
            of::<params::WriteStdinParams>(),
            writes.destructive(true).open_world(true),
        ),
        "read_output" => (
            "Read the output of a command from a cursor on, without consuming it.",
            of::<params::ReadOutput>(),
            reads,
        ),
        "kill" => (
            "End a running command with everything it started.",
            of::<params::KillParams>(),
            writes.destructive(true),
        ),
        "list_processes" => (
            "List the commands that are running.",
            of::<params::ListProcesses>(),
            reads,
        ),
        "wait_for" => (
            "Wait until a command writes something, falls silent, listens on a port, asks for input \
             or ends, whichever comes first.",
            of::<params::WaitFor>(),
            reads,
        ),
        "read_file" => (
            "Read a text file, or some lines of it.",
            of::<params::ReadFile>(),
            reads,
        ),
        "write_file" => (
            "Write a whole file.",
            of::<params::WriteFile>(),
            writes.destructive(true).idempotent(true),
        ),
        "edit" => (
            "Change files with a patch, or replace a text in one file.",
            of::<params::EditParams>(),
            writes.destructive(true),
        ),
        "list_dir" => ("List a directory.", of::<params::ListDir>(), reads),
        "search" => (
            "Search files for lines that match a regular expression.",
            of::<params::SearchFilesParams>(),
            reads,
        ),
        _ => (
            "Wait until a file, or something in a directory, changes.",
            of::<params::WatchOnce>(),
            reads,
        ),
    };
    let mut schema = (*schema).clone();
    if !several
        && let Some(properties) = schema.get_mut("properties")
        && let Some(properties) = properties.as_object_mut()
    {
        properties.remove("environment_id");
    }
    Tool::new(Cow::Owned(name.to_owned()), description, schema).annotate(annotations)
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
