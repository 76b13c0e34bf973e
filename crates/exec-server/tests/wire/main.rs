//! The built server, from outside: what it says on the wire, and what it leaves on the machine.
//!
//! A behaviour that does not depend on the transport is one function, run over all of them by
//! [`over_all!`]; the rest says which one it needs. Each test has a server of its own.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use exec_server_testkit::wire::{Client, Subject, Transport};
use tokio::process::Command;

mod capability;
mod command;
mod compatibility;
mod config;
mod death;
mod extensions;
mod faults;
mod flow;
mod fs;
mod http;
mod input;
mod listen;
mod memory;
mod methods;
mod order;
mod output;
mod search;
mod session;
mod signal;
mod snapshot;
mod start;
mod terminal;
mod terminate;
mod wait_for;
mod watch;

/// The server's program with nothing in its environment but a `PATH`.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A server and a client with a session on it.
async fn served(on: Transport) -> (Subject, Client) {
    let mut subject = Subject::start(on, program()).await;
    let client = subject.session().await;
    (subject, client)
}

/// Runs behaviours over every transport: each is an async function of the [`Transport`].
macro_rules! over_all {
    ($($behaviour:ident,)*) => {
        $crate::over_all!(websocket Websocket: $($behaviour)*);
        $crate::over_all!(unix Unix: $($behaviour)*);
        $crate::over_all!(stdio Stdio: $($behaviour)*);
    };
    ($module:ident $transport:ident: $($behaviour:ident)*) => {
        mod $module {
            $(
                #[tokio::test]
                async fn $behaviour() {
                    super::$behaviour(exec_server_testkit::wire::Transport::$transport).await;
                }
            )*
        }
    };
}
use over_all;

/// A file that is not declared here would silently not be tested.
#[test]
fn every_file_is_a_module() {
    let declared = include_str!("main.rs");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/wire")).unwrap();
    let mut seen = 0;
    for file in files {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        seen += 1;
        assert!(
            name == "main" || declared.contains(&format!("\nmod {name};\n")),
            "{name} is not declared"
        );
    }
    assert!(seen > 1);
}
