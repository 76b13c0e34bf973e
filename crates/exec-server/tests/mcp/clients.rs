//! Clients by others: the official Python SDK, and the real Codex CLI.

use std::process::Stdio;
use std::time::Duration;

use exec_server_testkit::codex::{self, CodexHome};
use exec_server_testkit::fake_model::{FakeModel, FunctionCall, ModelTurn};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::client::program;

/// The Python interpreter with the SDK, which `MCP_PYTHON` names.
fn python() -> Command {
    let Some(python) = std::env::var_os("MCP_PYTHON").filter(|path| !path.is_empty()) else {
        panic!(
            "MCP_PYTHON is not set, so there is no MCP client to test with: run `make interop`, \
             which installs one and sets it"
        );
    };
    let mut command = Command::new(python);
    command.kill_on_drop(true).stdin(Stdio::null());
    command
}

/// Uses every feature once, and prints the results as JSON.
const SCRIPT: &str = r#"
import asyncio, json, sys
from mcp import Client, StdioServerParameters

target = json.loads(sys.argv[1])
if isinstance(target, dict):
    target = StdioServerParameters(**target)

async def main():
    seen = {}
    mode = sys.argv[2]
    async with Client(target, mode=mode) as client:
        tools = await client.list_tools()
        seen["tools"] = [tool.name for tool in tools.tools]
        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            return {"text": result.content[0].text, "values": result.structured_content,
                    "error": bool(result.is_error)}
        seen["exec"] = await call("exec_command", cmd="echo hello; exit 3")
        session = await call("exec_command", cmd="read x; echo got $x", tty=True, yield_time_ms=250)
        number = session["values"]["session_id"]
        seen["write"] = await call("write_stdin", session_id=number, chars="it\n", yield_time_ms=30000)
        seen["file"] = await call("write_file", path="a.txt", content="one\n")
        seen["read"] = await call("read_file", path="a.txt")
        seen["missing"] = await call("read_file", path="/no/such")
        resources = await client.list_resources()
        seen["resources"] = len(resources.resources)
        log = await client.read_resource(str(resources.resources[0].uri))
        seen["log"] = log.contents[0].text
        progress = []
        async def told(done, total, message):
            progress.append(message)
        await client.call_tool("exec_command", {"cmd": "sleep 2.5"}, progress_callback=told)
        seen["progress"] = progress
        try:
            await client.call_tool("no_such_tool", {})
            seen["unknown"] = "accepted"
        except Exception as error:
            seen["unknown"] = str(error)
    print(json.dumps(seen))

asyncio.run(main())
"#;

async fn run(target: Value, mode: &str) -> Value {
    let mut command = python();
    command.args(["-c", SCRIPT, &target.to_string(), mode]);
    let output = timeout(Duration::from_secs(120), command.output()).await;
    let output = output.expect("the client ends in time").unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

fn check(seen: &Value) {
    assert_eq!(seen["tools"].as_array().unwrap().len(), 12, "{seen}");
    assert_eq!(seen["exec"]["values"]["exit_code"], 3, "{seen}");
    assert_eq!(seen["exec"]["values"]["output"], "hello\n");
    assert!(
        seen["exec"]["text"]
            .as_str()
            .unwrap()
            .ends_with("Output:\nhello\n")
    );
    let wrote = seen["write"]["values"]["output"].as_str().unwrap();
    assert!(wrote.contains("got it"), "{seen}");
    assert_eq!(seen["read"]["values"]["content"], "one\n");
    assert_eq!(seen["missing"]["error"], true);
    assert_eq!(seen["resources"], 2);
    assert!(seen["log"].as_str().unwrap().contains("hello"), "{seen}");
    assert!(!seen["progress"].as_array().unwrap().is_empty(), "{seen}");
    assert!(
        seen["unknown"].as_str().unwrap().contains("no_such_tool"),
        "{seen}"
    );
}

/// The SDK supports two lifecycles: the newest, and the older handshake.
#[tokio::test]
async fn python_sdk_works_over_stdio() {
    for mode in ["auto", "legacy"] {
        let work = tempfile::tempdir().unwrap();
        let target = json!({
            "command": env!("CARGO_BIN_EXE_exec-server"), "args": ["mcp"], "cwd": work.path(),
        });
        check(&run(target, mode).await);
    }
}

#[tokio::test]
async fn python_sdk_works_over_http() {
    for mode in ["auto", "legacy"] {
        let work = tempfile::tempdir().unwrap();
        let mut command = program(work.path());
        command.args(["mcp", "--http", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = lines.next_line().await.unwrap().unwrap();
        check(&run(json!(url), mode).await);
    }
}

/// The SDK connects to an MCP server through `mcp-proxy`.
#[tokio::test]
async fn python_sdk_works_through_mcp_proxy() {
    let work = tempfile::tempdir().unwrap();
    let binary = env!("CARGO_BIN_EXE_exec-server");
    // The MCP server behind the proxy is `exec-server mcp`.
    let args = ["mcp-proxy", "--on", "local", "--", binary, "mcp"];
    let target = json!({"command": binary, "args": args, "cwd": work.path()});
    check(&run(target, "auto").await);
}

/// The real Codex CLI with `exec-server mcp` among its MCP servers.
#[tokio::test]
async fn codex_cli_calls_exec_server_tools() {
    let model = FakeModel::start([
        ModelTurn::Calls(vec![FunctionCall::mcp(
            "c1",
            "box",
            "exec_command",
            json!({"cmd": "echo from the box; exit 4"}),
        )]),
        ModelTurn::Calls(vec![FunctionCall::mcp(
            "c2",
            "box",
            "write_file",
            json!({"path": "made.txt", "content": "by a tool\n"}),
        )]),
        ModelTurn::Message("done".to_owned()),
    ])
    .await;
    let home = CodexHome::new();
    let config = format!(
        "[mcp_servers.box]\ncommand = {:?}\nargs = [\"mcp\", \"--cwd\", {:?}]\nstartup_timeout_sec = 60\n",
        env!("CARGO_BIN_EXE_exec-server"),
        home.work(),
    );
    codex::exec_configured(&home, &model, &config, Duration::from_secs(120)).await;
    let output = model.output("c1").unwrap();
    assert!(output.contains("from the box"), "{output}");
    assert!(
        output.contains("code 4") || output.contains("\"exit_code\":4"),
        "{output}"
    );
    model.finish();
    let made = std::fs::read_to_string(home.work().join("made.txt")).unwrap();
    assert_eq!(made, "by a tool\n");
}
