//! Entry point of the `exec-server` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    exec_server::cli::main()
}
