//! Behaviours of a server that the real Codex CLI depends on.
//!
//! Each public function is one behaviour: a scripted model makes `codex exec` use the server, and
//! the function checks what the model receives. The server is a parameter: the same functions run
//! against this project's server and, to validate them, against the reference.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::codex::{self, CodexHome, CodexRun};
use crate::fake_model::{FakeModel, FunctionCall, ModelTurn};
use crate::server::ServerProcess;
use crate::site::{self, HttpSite, say};

/// Both output streams and the exit code of a short command reach the model.
pub async fn command_reports_streams_and_exit_code(url: &str) {
    let command = "echo to-stdout; echo to-stderr >&2; exit 3";
    let session = FinishedSession::run(
        url,
        [ModelTurn::Calls(vec![FunctionCall::exec_command(
            "run",
            command,
            UNTIL_EXIT_MS,
        )])],
    );
    let session = session.await;

    let answer = session.answer("run");
    expect(
        &answer,
        &["Process exited with code 3\n", "to-stdout\n", "to-stderr\n"],
    );
    let shown = session
        .run
        .commands()
        .next()
        .expect("the CLI shows the command");
    assert_eq!(shown["exit_code"], 3, "{shown:#}");
    assert_eq!(shown["status"], "failed", "{shown:#}");
}

/// The command is a descendant of the server; its environment is the server's with additions of the
/// CLI.
///
/// Start the server with [`MARKER`] in its environment.
pub async fn command_runs_on_the_server(server: &ServerProcess) {
    let (name, value) = MARKER;
    let command = format!(
        r#"echo "marker=${name} call=$CODEX_TOOL_CALL_ID in=$PWD"
        pid=$$
        while [ "${{pid:-0}}" -gt 1 ]; do
            echo "ancestor=$pid;"
            pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status")
        done"#
    );
    let script = [ModelTurn::Calls(vec![FunctionCall::exec_command(
        "where",
        &command,
        UNTIL_EXIT_MS,
    )])];
    let session = FinishedSession::run(server.url(), script).await;

    let answer = session.answer("where");
    let place = session.home.work();
    let place = format!("marker={value} call=where in={}\n", place.display());
    expect(&answer, &[&place, &format!("ancestor={};\n", server.pid())]);
}

/// The CLI sends the token that the server requires.
///
/// # Panics
///
/// The command does not run.
pub async fn command_runs_with_a_token(url: &str, token: &str) {
    let home = CodexHome::new();
    let environments = format!(
        "default = \"guarded\"\ninclude_local = false\n\n[[environments]]\nid = \"guarded\"\n\
         url = \"{url}\"\nauth_bearer_token = \"{token}\"\n"
    );
    std::fs::write(home.path().join("environments.toml"), environments)
        .expect("the CLI's environments to be written");
    let call = FunctionCall::exec_command("run", "echo let-in; exit 4", UNTIL_EXIT_MS);
    let session = FinishedSession::run_in(
        home,
        url,
        "danger-full-access",
        [ModelTurn::Calls(vec![call])],
    )
    .await;
    let answer = session.answer("run");
    expect(&answer, &["Process exited with code 4\n", "let-in\n"]);
}

/// A command runs on the executor of a registered environment.
///
/// # Panics
///
/// If its output or exit code does not reach the model.
pub async fn command_runs_through_a_registry(registry: &codex::CodexRegistry) {
    let home = CodexHome::new();
    let (name, value) = MARKER;
    let command = format!("echo \"marker=${name}\"; seq 1 100000; exit 6");
    let call =
        FunctionCall::exec_command("run", &command, UNTIL_EXIT_MS).with("max_output_tokens", 2000);
    let end = ModelTurn::Message("done".to_owned());
    let model = FakeModel::start([ModelTurn::Calls(vec![call]), end]).await;
    let run = codex::exec_registered(&home, &model, registry, RUN_LIMIT).await;
    model.finish();
    let answer = model
        .output("run")
        .unwrap_or_else(|| panic!("no answer\n{}", run.stderr));
    let marker = format!("marker={value}\n");
    expect(
        &answer,
        &["Process exited with code 6\n", &marker, "\n99999\n100000\n"],
    );
}

/// A command that runs for ten seconds loses no output when sockets on the way are cut.
///
/// `cut` is awaited when the command has started.
///
/// # Panics
///
/// Output is missing.
pub async fn command_survives_a_cut(
    registry: &codex::CodexRegistry,
    cut: impl Future<Output = ()> + Send + 'static,
) {
    survives(CodexTarget::Registry(registry), 10, RUN_LIMIT, cut).await;
}

/// A command loses no output when the client cannot reach the server for `length`.
///
/// `outage` is awaited when the command has started; it must take that long.
///
/// # Panics
///
/// Output is missing.
pub async fn command_survives_an_outage(
    target: CodexTarget<'_>,
    length: Duration,
    outage: impl Future<Output = ()> + Send + 'static,
) {
    // The command still runs when the client is back.
    let lines = u32::try_from(length.as_secs()).unwrap_or(u32::MAX) + 8;
    survives(target, lines, RUN_LIMIT + length, outage).await;
}

/// How the CLI reaches the server.
#[derive(Debug, Clone, Copy)]
pub enum CodexTarget<'a> {
    /// At this URL.
    Url(&'a str),
    /// Through this registry.
    Registry(&'a codex::CodexRegistry),
}

/// Runs a command that prints a line each second, awaits `cut` after its start, and checks that all
/// lines arrive.
async fn survives(
    target: CodexTarget<'_>,
    lines: u32,
    limit: Duration,
    cut: impl Future<Output = ()> + Send + 'static,
) {
    let home = CodexHome::new();
    let mut tether = Tether::new().await;
    let command = format!(
        "{}; for i in $(seq 1 {lines}); do echo line-$i; sleep 1; done; exit 8",
        tether.command()
    );
    let connected = tether.connected();
    let (started, has_started) = oneshot::channel();
    let cutting = tokio::spawn(async move {
        let _ = connected.await;
        cut.await;
        let _ = started.send(());
    });
    let script = [
        ModelTurn::Calls(vec![FunctionCall::exec_command("run", &command, YIELD_MS)]),
        ModelTurn::Wait(has_started),
        ModelTurn::Calls(vec![FunctionCall::write_stdin(
            "wait",
            "run",
            "",
            UNTIL_EXIT_MS,
        )]),
        ModelTurn::Message("done".to_owned()),
    ];
    let model = FakeModel::start(script).await;
    let run = match target {
        CodexTarget::Url(url) => codex::exec(&home, &model, url, limit).await,
        CodexTarget::Registry(registry) => {
            codex::exec_registered(&home, &model, registry, limit).await
        }
    };
    model.finish();
    cutting
        .await
        .expect("the task that cuts the sockets succeeds");
    let output_of = |id: &str| {
        model
            .output(id)
            .unwrap_or_else(|| panic!("no answer to `{id}`\n{}", run.stderr))
    };
    let answers = [output_of("run"), output_of("wait")].concat();
    for number in 1..=lines {
        let line = format!("line-{number}\n");
        assert_eq!(answers.matches(&line).count(), 1, "{line} in\n{answers}");
    }
    expect(&output_of("wait"), &["Process exited with code 8\n"]);
    tether.released().await;
}

/// In the CLI's sandbox a command can write to the project and to nothing else.
pub async fn sandboxed_command_writes_only_to_the_workspace(url: &str) {
    let command = "echo inside > made; cat made; echo outside > ../beside; mkdir .codex/x; \
                   echo \"codes=$? $(ls -d ../beside 2>/dev/null)\"";
    let script = [ModelTurn::Calls(vec![FunctionCall::exec_command(
        "run",
        command,
        UNTIL_EXIT_MS,
    )])];
    let session = FinishedSession::run_in(CodexHome::new(), url, "workspace-write", script).await;

    let answer = session.answer("run");
    expect(
        &answer,
        &["inside\n", "Read-only file system", "codes=1 \n"],
    );
    assert!(session.home.work().join("made").exists(), "{answer}");
    assert!(!session.home.work().join("../beside").exists(), "{answer}");
}

/// In a managed network a command reaches the hosts that the CLI allows through the server's proxy,
/// gets an error response for others, and has no other network access.
pub async fn managed_network_allows_only_hosts_of_the_cli(url: &str) {
    let site = HttpSite::saying(site::answer("200 OK", "", "reached\n")).await;
    let command = format!(
        r#"ask() {{ echo "[$1]"; shift; curl -sS -i -m 20 "$@" 2>&1; echo "[ended with $?]"; }}
        echo "proxy=$HTTP_PROXY"
        ask allowed '{site}/allowed'
        ask tunnel -p '{site}/tunnel'
        ask socks -x "$ALL_PROXY" '{site}/socks'
        ask denied 'http://denied.example/'
        ask missed 'http://missed.example/'
        ask direct --noproxy '*' '{site}/direct'"#,
        site = site.url("")
    );
    let script = [ModelTurn::Calls(vec![FunctionCall::exec_command(
        "run",
        &command,
        UNTIL_EXIT_MS,
    )])];
    let tables = format!("{NETWORK}\n[features.network_proxy]\nenabled = true\n{DOMAINS}");
    let session =
        FinishedSession::follow(CodexHome::new(), url, "workspace-write", &tables, script).await;

    let answer = session.answer("run");
    expect(&answer, &["proxy=http://127.0.0.1:"]);
    let part = |from: &str| {
        let found = answer.split_once(&format!("[{from}]\n"));
        let found = found.and_then(|(_, rest)| rest.split_once("[ended"));
        found
            .unwrap_or_else(|| panic!("no part {from:?} in the answer:\n{answer}"))
            .0
            .to_ascii_lowercase()
    };
    for way in ["allowed", "tunnel", "socks"] {
        expect(&part(way), &["200 ok", "reached\n"]);
    }
    expect(
        &part("denied"),
        &["403", "x-proxy-error: blocked-by-denylist"],
    );
    expect(
        &part("missed"),
        &["403", "x-proxy-error: blocked-by-allowlist"],
    );
    expect(&part("direct"), &["curl: (7)"]);
    let requests = site.requests();
    let paths: Vec<_> = requests.iter().map(|request| request.path()).collect();
    assert_eq!(paths, ["/allowed", "/tunnel", "/socks"]);
}

/// The CLI gets a request to decide about a host that its requirements do not name. It has the
/// model review the request, and its decision (`outcome` is `allow` or `deny`) is applied.
///
/// Returns the output of the command that requested [`UNLISTED_URL`].
///
/// # Panics
///
/// If the model was not asked to review.
pub async fn model_review_decides_about_an_unlisted_host(url: &str, outcome: &str) -> String {
    let home = CodexHome::new();
    let domains = DOMAINS.replace("features.network_proxy", "experimental_network");
    home.require(&format!(
        "[experimental_network]\nenabled = true\n{domains}"
    ));
    let command = format!("curl -sS -i -m 20 {UNLISTED_URL}");
    let review = json!({
        "risk_level": "low", "user_authorization": "high", "outcome": outcome,
        "rationale": "scripted",
    });
    // The CLI uses the same model for both conversations; the second is the review.
    let script = [
        ModelTurn::Calls(vec![FunctionCall::exec_command(
            "run",
            &command,
            UNTIL_EXIT_MS,
        )]),
        ModelTurn::Message(review.to_string()),
        ModelTurn::Message("done".to_owned()),
    ];
    let model = FakeModel::start(script).await;
    let run = codex::exec_reviewed(&home, &model, url, "workspace-write", NETWORK, RUN_LIMIT).await;
    model.finish();
    let answer = model.output("run");
    answer.unwrap_or_else(|| panic!("no answer in {:#?}\n{}", model.inputs(), run.stderr))
}

/// Host that no rule of the tests names. No request is sent to it: it is a public address because
/// the CLI resolves names before it allows them.
pub const UNLISTED_URL: &str = "http://93.184.216.34/asked";

/// Leaves network restrictions to the proxy instead of the CLI's sandbox.
const NETWORK: &str = "\n[sandbox_workspace_write]\nnetwork_access = true\n";

/// Hosts in the configuration of the CLI's proxy.
const DOMAINS: &str = "\n[features.network_proxy.domains]\n\"127.0.0.1\" = \"allow\"\n\
                       \"denied.example\" = \"deny\"\n";

/// Several commands of one turn run concurrently, and each output belongs to its call.
pub async fn parallel_commands_return_their_own_output(url: &str) {
    let ids = ["a", "b", "c", "d"];
    let call = |id| FunctionCall::exec_command(id, &format!("echo this-is-{id}"), UNTIL_EXIT_MS);
    let session = FinishedSession::run(url, [ModelTurn::Calls(ids.map(call).to_vec())]).await;
    for id in ids {
        let answer = session.answer(id);
        expect(
            &answer,
            &["Process exited with code 0\n", &format!("this-is-{id}\n")],
        );
        assert_eq!(answer.matches("this-is-").count(), 1, "{answer}");
    }
}

/// A terminal session takes two lines over two turns and exits with its own exit code.
pub async fn terminal_session_receives_input(url: &str) {
    let command = r#"test -t 0 && test -t 1 && echo "terminal $(stty size)"
        while read -r line; do
            if [ "$line" = quit ]; then echo goodbye; exit 5; fi
            echo "got:$line"
        done"#;
    let session = FinishedSession::run(
        url,
        [
            ModelTurn::Calls(vec![
                FunctionCall::exec_command("start", command, YIELD_MS).with("tty", true),
            ]),
            ModelTurn::Calls(vec![FunctionCall::write_stdin(
                "first", "start", "hello\n", YIELD_MS,
            )]),
            ModelTurn::Calls(vec![FunctionCall::write_stdin(
                "second",
                "start",
                "quit\n",
                UNTIL_EXIT_MS,
            )]),
        ],
    )
    .await;

    // Which output contains which text depends on timing; the order of texts does not.
    let answers = ["start", "first", "second"]
        .map(|id| session.answer(id))
        .concat();
    let mut rest = answers.as_str();
    // A terminal echoes input and ends lines with CR LF.
    for expected in [
        "terminal 24 80\r\n",
        "hello\r\n",
        "got:hello\r\n",
        "quit\r\n",
        "goodbye\r\n",
    ] {
        let found = rest.find(expected);
        let found = found.unwrap_or_else(|| panic!("no {expected:?} in its place in\n{answers}"));
        rest = &rest[found + expected.len()..];
    }
    expect(&session.answer("second"), &["Process exited with code 5\n"]);
}

/// Two megabytes of output arrive completely: the CLI keeps beginning and end and counts what it
/// omits, so a lost or duplicated byte changes its numbers.
pub async fn large_output_is_complete(url: &str) {
    let call = FunctionCall::exec_command("count", "seq 1 300000", UNTIL_EXIT_MS)
        .with("max_output_tokens", 2000);
    let session = FinishedSession::run(url, [ModelTurn::Calls(vec![call])]).await;

    let written = (1..=300_000)
        .map(|number| format!("{number}\n"))
        .collect::<String>();
    let left_out = written.len() - 2 * KEPT;
    let tokens = written.len().div_ceil(4);
    let answer = session.answer("count");
    expect(
        &answer,
        &[
            "Process exited with code 0\n",
            &format!("Original token count: {tokens}\n"),
            &format!("... {left_out} bytes omitted ..."),
            "\n1\n2\n3\n",
            "\n299999\n300000\n",
        ],
    );

    let shown = session
        .run
        .commands()
        .next()
        .expect("the CLI shows the command");
    let shown = shown["aggregated_output"]
        .as_str()
        .expect("its output is text");
    let (head, tail) = (&written[..KEPT], &written[written.len() - KEPT..]);
    // Not `assert_eq`, which would print two megabytes.
    assert!(
        shown == format!("{head}\n... {left_out} bytes omitted ...\n{tail}"),
        "what the CLI shows differs from what was written, in {} bytes",
        shown.len()
    );
}

/// Ctrl-C to a command without a terminal interrupts it.
pub async fn interrupt_reaches_a_pipe_process(url: &str) {
    let mut tether = Tether::new().await;
    let command = format!(
        "trap 'echo interrupted; exit 7' INT; {}; while :; do sleep 0.1; done",
        tether.command()
    );
    let session = FinishedSession::run(
        url,
        [
            ModelTurn::Calls(vec![FunctionCall::exec_command(
                "start", &command, YIELD_MS,
            )]),
            ModelTurn::Wait(tether.connected()),
            ModelTurn::Calls(vec![FunctionCall::write_stdin(
                "interrupt",
                "start",
                "\u{3}",
                UNTIL_EXIT_MS,
            )]),
        ],
    )
    .await;
    let answer = session.answer("interrupt");
    expect(&answer, &["Process exited with code 7\n", "interrupted\n"]);
    tether.released().await;
}

/// A command that still runs when the CLI exits ends soon after, with its children.
pub async fn running_process_ends_with_the_run(url: &str) {
    let mut tether = Tether::new().await;
    let command = format!("{}; sleep 600 & wait", tether.command());
    let session = FinishedSession::run(
        url,
        [
            ModelTurn::Calls(vec![FunctionCall::exec_command(
                "start", &command, YIELD_MS,
            )]),
            ModelTurn::Wait(tether.connected()),
        ],
    )
    .await;
    expect(
        &session.answer("start"),
        &["Process running with session ID "],
    );
    tether.released().await;
}

/// HTTP server that is an MCP server with one tool, `greet`.
async fn tool_site() -> HttpSite {
    HttpSite::start(|request, mut stream| async move {
        let message: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let result = match message["method"].as_str() {
            Some("initialize") => json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "site", "version": "1"},
            }),
            Some("tools/list") => json!({"tools": [{
                "name": "greet", "description": "greets",
                "inputSchema": {"type": "object", "properties": {}},
            }]}),
            Some("tools/call") => json!({"content": [{"type": "text", "text": "greetings"}]}),
            Some(_) => return say(&mut stream, &site::answer("202 Accepted", "", "")).await,
            // If the model sends no events.
            None => {
                let refused = site::answer("405 Method Not Allowed", "", "");
                return say(&mut stream, &refused).await;
            }
        };
        let body = json!({"jsonrpc": "2.0", "id": message["id"], "result": result});
        let answer = site::answer(
            "200 OK",
            "content-type: application/json\r\n",
            body.to_string(),
        );
        say(&mut stream, &answer).await;
    })
    .await
}

/// A tool server in the CLI's configuration is reached from the server's machine, with a token from
/// that machine's environment.
///
/// Start the server with [`MARKER`] in its environment.
pub async fn tools_over_http_are_reached_from_the_server(url: &str) {
    let site = tool_site().await;
    let tables = format!(
        "\n[mcp_servers.web]\nurl = \"{}\"\nenvironment_id = \"remote\"\n\
         bearer_token_env_var = \"{}\"\n",
        site.url("/mcp"),
        MARKER.0
    );
    let script = [ModelTurn::Calls(vec![FunctionCall::mcp(
        "call",
        "web",
        "greet",
        json!({}),
    )])];
    let session = FinishedSession::run_with(CodexHome::new(), url, &tables, script).await;
    expect(&session.answer("call"), &["greetings"]);
    let token = format!("Bearer {}", MARKER.1);
    for request in site.requests() {
        assert_eq!(
            request.header("authorization"),
            Some(&*token),
            "{request:?}"
        );
    }
}

/// A tool server in the configuration file of the server's machine is offered to the model.
///
/// Start the server with `CODEX_HOME` set to `home`.
pub async fn tools_in_configuration_of_the_server_are_offered(url: &str, home: &Path) {
    let site = tool_site().await;
    let config = format!("[mcp_servers.web]\nurl = \"{}\"\n", site.url("/mcp"));
    std::fs::write(home.join("config.toml"), config).expect("a home that can be written");
    let script = [ModelTurn::Calls(vec![FunctionCall::mcp(
        "call",
        "web",
        "greet",
        json!({}),
    )])];
    let session = FinishedSession::run_with(CodexHome::new(), url, "", script).await;
    expect(&session.answer("call"), &["greetings"]);
}

/// Commands of one conversation share the result of the shell's start-up files, which run once.
///
/// Start the server with `HOME` set to `home`.
pub async fn shell_start_up_files_run_once_per_conversation(url: &str, home: &Path) {
    let profile = "echo ran >> \"$HOME/count\"\nf() { echo \"this is f\"; }\n";
    for name in [".bash_profile", ".zprofile", ".profile"] {
        std::fs::write(home.join(name), profile).expect("a home that can be written");
    }
    let ids = ["a", "b", "c"];
    let turn = |id| ModelTurn::Calls(vec![FunctionCall::exec_command(id, "f", UNTIL_EXIT_MS)]);
    let tables = "\n[features]\nshell_snapshot_v2 = true\n";
    let session = FinishedSession::run_with(CodexHome::new(), url, tables, ids.map(turn)).await;
    for id in ids {
        expect(&session.answer(id), &["this is f\n"]);
    }
    let count = std::fs::read_to_string(home.join("count")).expect("start-up files that ran");
    assert_eq!(count, "ran\n");
}

/// Generates one `#[tokio::test]` per behaviour of this module, for the servers that `$start`
/// starts.
///
/// `$start` is an async function without arguments that returns a pair: a guard that must outlive
/// the server, and the [`ServerProcess`], started with [`MARKER`]. The behaviours are listed only here, so
/// that every server is tested with all of them.
#[macro_export]
macro_rules! interop_tests {
    ($start:path) => {
        $crate::interop_tests! { $start =>
            command_reports_streams_and_exit_code(server => server.url());
            command_runs_on_the_server(server => &server);
            parallel_commands_return_their_own_output(server => server.url());
            terminal_session_receives_input(server => server.url());
            large_output_is_complete(server => server.url());
            interrupt_reaches_a_pipe_process(server => server.url());
            running_process_ends_with_the_run(server => server.url());
            sandboxed_command_writes_only_to_the_workspace(server => server.url());
            managed_network_allows_only_hosts_of_the_cli(server => server.url());
            tools_over_http_are_reached_from_the_server(server => server.url());
        }
    };
    ($start:path => $($name:ident($server:ident => $subject:expr);)*) => {$(
        #[tokio::test]
        async fn $name() {
            // Locals are dropped in reverse order: the server first.
            let (_guard, $server) = $start().await;
            $crate::interop::$name($subject).await;
        }
    )*};
}

/// Variable that must be in the environment of the server under test.
pub const MARKER: (&str, &str) = ("EXEC_SERVER_INTEROP_MARKER", "set-for-the-server-only");

/// A finished run of the CLI.
struct FinishedSession {
    model: FakeModel,
    run: CodexRun,
    home: CodexHome,
}

impl FinishedSession {
    /// Runs the CLI with `script` and a closing message on the server at `url`.
    async fn run(url: &str, script: impl IntoIterator<Item = ModelTurn>) -> Self {
        Self::run_in(CodexHome::new(), url, "danger-full-access", script).await
    }

    /// Like [`FinishedSession::run`], with an existing home and a `sandbox_mode` of the CLI.
    async fn run_in(
        home: CodexHome,
        url: &str,
        mode: &str,
        script: impl IntoIterator<Item = ModelTurn>,
    ) -> Self {
        Self::follow(home, url, mode, "", script).await
    }

    /// Like [`FinishedSession::run`], with additional configuration.
    async fn run_with(
        home: CodexHome,
        url: &str,
        tables: &str,
        script: impl IntoIterator<Item = ModelTurn>,
    ) -> Self {
        Self::follow(home, url, "danger-full-access", tables, script).await
    }

    async fn follow(
        home: CodexHome,
        url: &str,
        mode: &str,
        tables: &str,
        script: impl IntoIterator<Item = ModelTurn>,
    ) -> Self {
        let end = ModelTurn::Message("done".to_owned());
        let model = FakeModel::start(script.into_iter().chain([end])).await;
        let run = codex::exec_with(&home, &model, url, mode, tables, RUN_LIMIT).await;
        model.finish();
        Self { model, run, home }
    }

    /// Returns the output of the call `id`, as the model received it.
    fn answer(&self, id: &str) -> String {
        self.model.output(id).unwrap_or_else(|| {
            panic!(
                "no answer to the call `{id}` in {:#?}\n{}",
                self.model.inputs(),
                self.run.stderr
            )
        })
    }
}

/// Connection that a process and all its descendants hold open.
///
/// Opened by [`Tether::command`] in the process, and closed when the last holder exits. Needs no
/// process ids and no polling.
struct Tether {
    port: u16,
    connected: Option<oneshot::Receiver<()>>,
    held: JoinHandle<()>,
}

impl Tether {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a loopback port");
        let port = listener
            .local_addr()
            .expect("the address of a bound listener")
            .port();
        let (sender, connected) = oneshot::channel();
        let held = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let _ = sender.send(());
            // A reset counts as the end, like FIN.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        Self {
            port,
            connected: Some(connected),
            held,
        }
    }

    /// Returns the bash command that opens the connection.
    fn command(&self) -> String {
        format!("exec 9<>/dev/tcp/127.0.0.1/{}", self.port)
    }

    /// Returns a channel that reports the opened connection.
    fn connected(&mut self) -> oneshot::Receiver<()> {
        self.connected.take().expect("asked for once")
    }

    /// Waits until all holders have exited.
    async fn released(self) {
        let ended = timeout(END_LIMIT, self.held).await;
        let ended = ended.unwrap_or_else(|_| panic!("still running {END_LIMIT:?} after its end"));
        ended.expect("the task that watches the tether");
    }
}

/// Checks that `answer` contains all `parts`.
fn expect(answer: &str, parts: &[&str]) {
    for part in parts {
        assert!(
            answer.contains(part),
            "no {part:?} in the answer:\n{answer}"
        );
    }
}

/// Yield window in milliseconds for a command that continues: the CLI always waits for all of it.
const YIELD_MS: u64 = 500;

/// Yield window in milliseconds for a command that exits: the CLI waits for its exit, for at most
/// 30 s.
const UNTIL_EXIT_MS: u64 = 30_000;

/// Bytes that the CLI keeps at each end of a long output.
const KEPT: usize = 512 << 10;

/// Time limit of one run of the CLI, which takes seconds.
const RUN_LIMIT: Duration = Duration::from_secs(60);

/// Time within which a terminated process must exit. Less than the 80 s after which a server ends a
/// session without a connection, so that only the client's request can be the cause.
const END_LIMIT: Duration = Duration::from_secs(10);
