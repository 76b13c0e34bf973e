//! Command-line definitions (clap).

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::scenario::ScenarioName;

/// Measure an exec-server against the physical floor of this machine
///
/// The table goes to standard output, progress to standard error. Ratios are against the floor of
/// the same run: how many times the machine's own cost, or what part of its rate. A target in
/// parentheses is an aim and not a requirement; `pass+` means that it was reached.
///
/// Exit codes: 0 done, 1 a target was missed and --check was given, 2 the benchmark itself failed.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct BenchArgs {
    /// Command of the server under test; `--listen ws://127.0.0.1:0` is appended
    ///
    /// [default: a copy of `exec-server` beside this program]
    #[arg(long, value_name = "CMD")]
    pub(crate) server: Option<String>,
    /// Command of another server with the same wire protocol, measured side by side
    #[arg(long, value_name = "CMD")]
    pub(crate) peer: Option<String>,
    /// Fewer rounds and smaller sizes
    #[arg(long)]
    pub(crate) quick: bool,
    /// Run these scenarios only
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) only: Vec<ScenarioName>,
    /// Run only rows whose name contains TEXT, and those measured with them
    #[arg(long, value_name = "TEXT")]
    pub(crate) rows: Option<String>,
    /// Write the figures to a file, too
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Run mixed work for this time (such as 60m or 90s) instead, and fail if a figure grows
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) soak: Option<Duration>,
    /// Exit with 1 if a target is missed
    #[arg(long)]
    pub(crate) check: bool,
    /// As a child: write this many bytes of the pattern
    #[arg(long, hide = true, value_name = "BYTES")]
    pub(crate) emit_pattern: Option<u64>,
    /// As a child: write this many bytes, one every 100 µs
    #[arg(long, hide = true, value_name = "BYTES")]
    pub(crate) emit_slowly: Option<u64>,
    /// As a child: read this many bytes of the pattern
    #[arg(long, hide = true, value_name = "BYTES")]
    pub(crate) check_pattern: Option<u64>,
    /// As a child: respond to websocket handshakes and send this many bytes of the pattern
    #[arg(long, hide = true, value_name = "BYTES")]
    pub(crate) answer_websockets: Option<u64>,
    /// As a child: send the site this many requests, through the proxy of the environment
    #[arg(long, hide = true, value_name = "COUNT", requires = "site")]
    pub(crate) proxied_requests: Option<usize>,
    /// As a child: receive this many bytes from the site on each of many connections
    #[arg(long, hide = true, value_name = "BYTES", requires = "site")]
    pub(crate) proxied_streams: Option<u64>,
    /// As a child: address of the site
    #[arg(long, hide = true, value_name = "ADDRESS")]
    pub(crate) site: Option<String>,
    /// As a child: respond to every websocket message with a short one
    #[arg(long, hide = true)]
    pub(crate) echo_websockets: bool,
}

/// Parses a number of hours, minutes or seconds: `1h`, `60m`, `90s`.
fn duration(text: &str) -> Result<Duration, String> {
    let units = [("h", 3600), ("m", 60), ("s", 1)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*seconds)
    });
    match parsed {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err("expected a time such as 1h, 60m or 90s".to_owned()),
    }
}
