//! The command line: what was typed, what it means, and what to do.

mod args;
mod serve;
mod settings;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Args, Command};

/// Runs the program.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.command {
        None => serve::run(args.serve),
        Some(Command::Serve(serve)) => serve::run(serve),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
