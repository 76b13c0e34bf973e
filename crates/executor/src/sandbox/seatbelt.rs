//! A policy as a profile for macOS Seatbelt.
//!
//! A pure function to the text that `sandbox-exec -p` takes. Executors run on Linux only so far:
//! nothing uses the text yet, and it has not been tried on a Mac.

use std::fmt::Write as _;
use std::path::Path;

use exec_server_protocol::sandbox::{Access, Network};

use super::policy::Policy;

/// The profile of a policy; everything that it does not allow is denied.
pub fn profile(policy: &Policy) -> String {
    let mut text = String::from("(version 1)\n");
    let Some(view) = &policy.view else {
        text += "(allow default)\n";
        if policy.network == Network::Restricted {
            text += "(deny network*)\n";
        }
        return text;
    };
    text += "(deny default)\n\
             (allow process-exec process-fork)\n\
             (allow signal process-info* (target same-sandbox))\n\
             (allow sysctl-read)\n\
             (allow mach-lookup (global-name \"com.apple.system.opendirectoryd.libinfo\"))\n\
             (allow ipc-posix-sem)\n\
             (allow pseudo-tty)\n\
             (allow file-read* file-write* file-ioctl (literal \"/dev/null\") (literal \"/dev/tty\") \
             (literal \"/dev/ptmx\") (regex #\"^/dev/ttys[0-9]+$\"))\n\
             (allow file-read-metadata)\n";
    // The last rule that matches counts, so that what is inside comes after what is around it.
    for (path, access) in &view.rules {
        let filter = filter(path);
        let line = match access {
            Access::Read => {
                format!("(deny file-write* {filter})\n(allow file-read* {filter})\n")
            }
            Access::Write => format!("(allow file-read* file-write* {filter})\n"),
            Access::Deny => format!("(deny file-read* file-write* {filter})\n"),
        };
        text += &line;
    }
    for pin in &view.pins {
        let _ = writeln!(text, "(deny file-write* (literal {}))", quoted(pin));
    }
    text += match policy.network {
        Network::Enabled => "(allow network* system-socket)\n",
        Network::Restricted => {
            "(deny network*)\n(allow network* (local unix) (socket-domain AF_UNIX))\n"
        }
    };
    text
}

fn filter(path: &Path) -> String {
    format!("(subpath {})", quoted(path))
}

/// A string of the profile's language.
fn quoted(path: &Path) -> String {
    let mut text = String::from("\"");
    for character in path.to_string_lossy().chars() {
        if matches!(character, '"' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::policy::View;
    use super::*;

    #[test]
    fn what_is_inside_comes_after_what_is_around_it() {
        let rules = BTreeMap::from([
            ("/".into(), Access::Read),
            ("/w".into(), Access::Write),
            ("/w/.git".into(), Access::Read),
            ("/w/a\"b".into(), Access::Deny),
        ]);
        let policy = Policy {
            view: Some(View {
                rules,
                ..View::default()
            }),
            network: Network::Restricted,
        };
        let text = profile(&policy);
        let at = |part: &str| {
            text.find(part)
                .unwrap_or_else(|| panic!("{part} in {text}"))
        };
        assert!(text.starts_with("(version 1)\n(deny default)\n"));
        assert!(at("(allow file-read* (subpath \"/\"))") < at("file-write* (subpath \"/w\"))"));
        assert!(
            at("file-write* (subpath \"/w\"))") < at("(deny file-write* (subpath \"/w/.git\"))")
        );
        assert!(text.contains("(deny file-read* file-write* (subpath \"/w/a\\\"b\"))"));
        assert!(text.contains("(deny network*)"));
    }

    #[test]
    fn without_files_there_is_only_the_network() {
        let policy = |network| Policy {
            view: None,
            network,
        };
        assert_eq!(
            profile(&policy(Network::Enabled)),
            "(version 1)\n(allow default)\n"
        );
        assert!(profile(&policy(Network::Restricted)).ends_with("(deny network*)\n"));
    }
}
