//! `exec-server env trust`: the trusted keys of environments.

use std::fmt::Display;
use std::process::ExitCode;

use anyhow::Context as _;
use exec_server_client::registry::{Fingerprint, RegistryDial, RegistryUrl};

use super::args::TrustArgs;
use super::error::notice;
use super::table::visible;
use super::{print, registry, runtime};

pub(super) fn run(args: &TrustArgs) -> anyhow::Result<ExitCode> {
    let known = registry::known()?;
    let Some(environment) = &args.environment else {
        let lines = known.list()?.into_iter();
        let text: String = lines.map(|(url, key)| line(&url, key)).collect();
        print(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    };
    let url: RegistryUrl = environment.parse()?;
    if args.forget {
        match known.forget(&url)? {
            Some(key) => notice(&format!("removed the key {key} of {url}")),
            None => notice(&format!("there was no key for {url}")),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let key: Fingerprint = match &args.fingerprint {
        Some(text) => text.parse()?,
        None => {
            let dial = RegistryDial::new(registry::args(&url, &args.server, &known)?)?;
            runtime()?
                .block_on(dial.current_key())
                .map_err(exec_server_client::ExecServerError::from)
                .with_context(|| format!("cannot get the key of {url}"))?
        }
    };
    match known.trust(&url, key)? {
        Some(before) if before != key => {
            notice(&format!("replaced the key {before} of {url}"));
        }
        _ => {}
    }
    print(line(&url, key).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// A line of output; the file of known keys may have been written by another program.
fn line(url: &impl Display, key: Fingerprint) -> String {
    format!("{} {key}\n", visible(&url.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_escapes_what_controls_a_terminal() {
        let key: Fingerprint = "07".repeat(32).parse().unwrap();
        let line = line(&"registry://a\u{1b}[2J\nb/c\u{202e}", key);
        assert!(
            line.starts_with("registry://a\\u{1b}[2J\\nb/c\\u{202e} "),
            "{line}"
        );
    }
}
