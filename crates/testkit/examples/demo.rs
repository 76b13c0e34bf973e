//! Demo: the real Codex CLI on a server, without login, key or network.
//!
//! Run `make demo`, or, with any server that takes `--listen`: `CODEX_BIN=$(scripts/codex) cargo
//! run -p exec-server-testkit --example demo -- SERVER [ARGS]`
#![expect(clippy::print_stdout, reason = "a demo prints its output")]

use std::env;
use std::time::Duration;

use exec_server_testkit::codex::{self, CodexHome};
use exec_server_testkit::fake_model::{FakeModel, FunctionCall, ModelTurn};
use exec_server_testkit::server::ServerProcess;
use tokio::process::Command;

const COMMAND: &str = r#"echo "pid $$, child of $PPID: $(tr '\0' ' ' <"/proc/$PPID/cmdline")""#;
const QUESTION: &str = r#"read -rp "your name? " name; echo "hello, $name""#;

#[tokio::main]
async fn main() {
    let mut words = env::args_os().skip(1);
    let program = words.next().expect("usage: demo SERVER [ARGS]");
    let mut command = Command::new(program);
    command.args(words);
    let server = ServerProcess::start(command).await;
    println!("server      pid {} on {}", server.pid(), server.url());

    let question = FunctionCall::exec_command("question", QUESTION, 500).with("tty", true);
    let model = FakeModel::start([
        ModelTurn::Calls(vec![FunctionCall::exec_command("command", COMMAND, 10_000)]),
        ModelTurn::Calls(vec![question]),
        ModelTurn::Calls(vec![FunctionCall::write_stdin(
            "answer",
            "question",
            "a scripted model\n",
            10_000,
        )]),
        ModelTurn::Message("done".to_owned()),
    ])
    .await;
    let home = CodexHome::new();
    codex::exec(&home, &model, server.url(), Duration::from_secs(60)).await;
    model.finish();

    let calls = [
        ("command", format!("exec_command {COMMAND}")),
        (
            "question",
            format!("exec_command {QUESTION}  (in a terminal)"),
        ),
        ("answer", "write_stdin a scripted model".to_owned()),
    ];
    for (id, call) in calls {
        println!("\nmodel asks  {call}");
        for line in model.output(id).unwrap_or_default().lines() {
            println!("model gets  {line}");
        }
    }
}
