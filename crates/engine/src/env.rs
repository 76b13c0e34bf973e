//! Environment of a child process, built from a policy, the request and a list of blocked names.
//!
//! Works on values; the caller reads the server's own environment.

use std::collections::BTreeMap;

use exec_server_protocol::process::{EnvPolicy, Inherit};

/// Names that a child process never receives, whatever the request says: they hold credentials of
/// the server or of a peer that runs inside one.
const NEVER: [&str; 6] = [
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "NODE_REPL_AUTH_TOKEN",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
];

/// Names that `inherit: core` copies.
const CORE: [&str; 11] = [
    "PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME",
    "USER",
];

/// Names that are removed unless the policy disables this.
const DEFAULT_EXCLUDES: [&str; 3] = ["*KEY*", "*SECRET*", "*TOKEN*"];

/// Builds the environment of a child process.
///
/// Without a policy it is exactly `overlay`. With a policy it is the filtered environment `own` of
/// the server, then `overlay` is added unfiltered.
pub fn build(
    own: &BTreeMap<String, String>,
    policy: Option<&EnvPolicy>,
    overlay: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut env = match policy {
        None => overlay,
        Some(policy) => {
            let mut env = apply(own, policy);
            env.extend(overlay);
            env
        }
    };
    env.retain(|name, _| !NEVER.iter().any(|never| never.eq_ignore_ascii_case(name)));
    env
}

/// Filters variables that start-up files of a shell set, with the same rules as if they were in the
/// server's own environment.
pub(crate) fn filter(
    set: BTreeMap<String, String>,
    policy: Option<&EnvPolicy>,
) -> BTreeMap<String, String> {
    let policy = policy.map(|policy| EnvPolicy {
        inherit: Inherit::All,
        set: BTreeMap::new(),
        ..policy.clone()
    });
    match &policy {
        Some(policy) => build(&set, Some(policy), BTreeMap::new()),
        None => build(&BTreeMap::new(), None, set),
    }
}

fn apply(own: &BTreeMap<String, String>, policy: &EnvPolicy) -> BTreeMap<String, String> {
    let matches = |patterns: &[String], name: &str| patterns.iter().any(|p| glob(p, name));
    let mut env = match policy.inherit {
        Inherit::None => BTreeMap::new(),
        Inherit::All | Inherit::Core => own.clone(),
    };
    if policy.inherit == Inherit::Core {
        env.retain(|name, _| CORE.iter().any(|core| core.eq_ignore_ascii_case(name)));
    }
    if !policy.ignore_default_excludes {
        env.retain(|name, _| !DEFAULT_EXCLUDES.iter().any(|pattern| glob(pattern, name)));
    }
    env.retain(|name, _| !matches(&policy.exclude, name));
    env.extend(
        policy
            .set
            .iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    if !policy.include_only.is_empty() {
        env.retain(|name, _| matches(&policy.include_only, name));
    }
    env
}

/// Matches a whole name, ignoring case: `*` matches any characters, `?` exactly one.
fn glob(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().flat_map(char::to_lowercase).collect();
    let name: Vec<char> = name.chars().flat_map(char::to_lowercase).collect();
    // Greedy match with one backtrack point, which is enough for `*`: linear in practice, and at
    // worst the product of both lengths.
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    fn policy(inherit: Inherit) -> EnvPolicy {
        EnvPolicy {
            inherit,
            ignore_default_excludes: false,
            exclude: Vec::new(),
            set: BTreeMap::new(),
            include_only: Vec::new(),
        }
    }

    #[test]
    fn build_without_policy_uses_only_the_request() {
        let own = map(&[("HOME", "/root")]);
        assert_eq!(build(&own, None, map(&[("A", "1")])), map(&[("A", "1")]));
    }

    #[test]
    fn policies_filter_then_set_then_narrow() {
        let own = map(&[
            ("HOME", "/h"),
            ("API_KEY", "k"),
            ("X", "x"),
            ("my_token", "t"),
        ]);
        assert_eq!(
            build(&own, Some(&policy(Inherit::All)), map(&[])),
            map(&[("HOME", "/h"), ("X", "x")])
        );
        assert_eq!(
            build(&own, Some(&policy(Inherit::Core)), map(&[])),
            map(&[("HOME", "/h")])
        );
        let narrow = EnvPolicy {
            ignore_default_excludes: true,
            exclude: vec!["h?me".into()],
            set: map(&[("SET_ME", "1"), ("DROPPED", "2")]),
            include_only: vec!["*_*".into()],
            ..policy(Inherit::All)
        };
        let expected = map(&[
            ("API_KEY", "k"),
            ("my_token", "t"),
            ("SET_ME", "1"),
            ("Z", "z"),
        ]);
        assert_eq!(build(&own, Some(&narrow), map(&[("Z", "z")])), expected);
    }

    #[test]
    fn blocked_names_are_always_removed() {
        let secret = map(&[("openai_identity_token_file", "x"), ("FINE", "1")]);
        let all = EnvPolicy {
            ignore_default_excludes: true,
            ..policy(Inherit::All)
        };
        assert_eq!(
            build(&secret, Some(&all), secret.clone()),
            map(&[("FINE", "1")])
        );
    }

    #[test]
    fn globs_match_whole_names() {
        for (pattern, name, expected) in [
            ("*KEY*", "keyboard", true),
            ("A*B*C", "axxbxxbc", true),
            ("A*B", "AxC", false),
            ("?", "", false),
            ("*", "", true),
            ("PLAIN", "MY_PLAIN", false),
            ("**", "x", true),
        ] {
            assert_eq!(glob(pattern, name), expected, "{pattern} {name}");
        }
    }
}
