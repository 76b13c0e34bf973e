//! What can be typed.

use clap::{Parser, Subcommand};

/// Run commands and use files on any machine.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version, args_conflicts_with_subcommands = true)]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Serve clients (the default).
    Serve(ServeArgs),
}

/// Options of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct ServeArgs {
    /// Where to listen: `ws://IP:PORT`, `unix:///PATH`, `stdio` or `off`.
    #[arg(long, value_name = "URL", default_value = exec_server_service::DEFAULT_LISTEN_URL)]
    pub(super) listen: String,

    /// Requests of one connection that are worked on at the same time; 1 is strictly serial.
    #[arg(long, value_name = "COUNT")]
    pub(super) concurrent_requests: Option<std::num::NonZeroUsize>,

    /// Listen on an address that others can reach, without authentication.
    #[arg(long)]
    pub(super) danger_no_auth: bool,
}
