//! The built server as a black box: its protocol, and what it leaves on the machine.
//!
//! A behaviour that does not depend on the transport is one function, which [`over_all!`] runs over
//! every transport; other tests name the transport they need. Each test starts its own server.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use exec_server_testkit::wire::{TestedServer, Transport, WireClient};
use tokio::process::Command;

mod capability;
mod catalog;
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
#[cfg(feature = "interop")]
mod interop;
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
mod worked_session;

/// The server binary, with only `PATH` in its environment.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A server and a client with a session on it.
async fn served(on: Transport) -> (TestedServer, WireClient) {
    let mut subject = TestedServer::start(on, program()).await;
    let client = subject.session().await;
    (subject, client)
}

/// Makes each function a test over every [`Transport`].
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

/// A file that is not declared as a module here would not be compiled, and its tests would not run.
#[test]
fn every_test_file_is_declared() {
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
