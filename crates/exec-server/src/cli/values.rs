//! Values of options and settings: durations, signals, and what a choice allows.

use std::time::Duration;

use exec_server_protocol::process::SignalName;
use exec_server_transport::time::parse_utc;

pub(super) const MODES: &[&str] = &["capability-token", "signed-bearer-token"];
pub(super) const FORMATS: &[&str] = &["text", "json"];

/// Checks a time in UTC.
pub(super) fn parse_time(text: &str) -> Result<String, String> {
    match parse_utc(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write 2027-01-31T12:00:00Z, or 2027-01-31 for the end of that day".to_owned()),
    }
}

/// Parses `500ms`, `10s`, `5m`, `1h` or plain seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{text}` is not a time; write it as 500ms, 10s, 5m or 1h"))?;
    let unit = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        other => return Err(format!("unknown unit `{other}`; use ms, s, m or h")),
    };
    Duration::try_from_secs_f64(number * unit).map_err(|error| format!("`{text}`: {error}"))
}

/// Parses a signal: a name with or without `SIG`, an alias, or a number.
pub(super) fn signal_named(text: &str) -> Result<SignalName, String> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    Ok(match name {
        "INT" | "INTERRUPT" | "2" => SignalName::Interrupt,
        "TERM" | "TERMINATE" | "15" => SignalName::Terminate,
        "KILL" | "9" => SignalName::Kill,
        "HUP" | "HANGUP" | "1" => SignalName::Hangup,
        "QUIT" | "3" => SignalName::Quit,
        "USR1" | "USER1" | "10" => SignalName::User1,
        "USR2" | "USER2" | "12" => SignalName::User2,
        "STOP" | "19" => SignalName::Stop,
        "CONT" | "CONTINUE" | "18" => SignalName::Continue,
        _ => {
            return Err(format!(
                "there is no signal `{text}`; one of INT, TERM, KILL, HUP, QUIT, USR1, USR2, STOP, CONT"
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_parse_with_units_and_reject_other_text() {
        for (text, millis) in [
            ("90", 90_000),
            ("500ms", 500),
            ("1.5s", 1500),
            ("2m", 120_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for text in ["", "s", "-1s", "1d", "1e300h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn signals_parse_by_name_and_number() {
        for text in ["INT", "SIGINT", "sigint", "2", "interrupt"] {
            assert_eq!(signal_named(text), Ok(SignalName::Interrupt), "{text}");
        }
        assert!(signal_named("TOP").unwrap_err().contains("USR1"));
    }
}
