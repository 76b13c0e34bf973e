//! Signal names and numbers.

use exec_server_protocol::process::SignalName;
use rustix::process::Signal;

/// The signal with this wire name.
pub fn named(name: SignalName) -> Signal {
    match name {
        SignalName::Interrupt => Signal::INT,
        SignalName::Terminate => Signal::TERM,
        SignalName::Kill => Signal::KILL,
        SignalName::Hangup => Signal::HUP,
        SignalName::Quit => Signal::QUIT,
        SignalName::User1 => Signal::USR1,
        SignalName::User2 => Signal::USR2,
        SignalName::Stop => Signal::STOP,
        SignalName::Continue => Signal::CONT,
    }
}

/// The usual name of a signal: `SIGTERM`, or `SIG34` for one without a name.
pub fn name(number: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
        "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
        "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let index = usize::try_from(number)
        .ok()
        .and_then(|number| number.checked_sub(1));
    match index.and_then(|index| NAMES.get(index)) {
        Some(name) => format!("SIG{name}"),
        None => format!("SIG{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_names_match_their_numbers() {
        for (number, text) in [
            (1, "SIGHUP"),
            (9, "SIGKILL"),
            (15, "SIGTERM"),
            (31, "SIGSYS"),
        ] {
            assert_eq!(name(number), text);
        }
        assert_eq!((name(34), name(0)), ("SIG34".to_owned(), "SIG0".to_owned()));
        assert_eq!(name(named(SignalName::User2).as_raw()), "SIGUSR2");
    }
}
