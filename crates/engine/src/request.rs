//! Validation of `process/start` parameters, and conversion to a `ProcessSpec`.
//!
//! Contains the checks that do not depend on the caller's identity, so that they are the same for
//! local and remote callers.

use std::collections::BTreeMap;
use std::time::Duration;

use exec_server_executor::{PrivateNetwork, ProcessSpec, PtySize, StartError, Stdio, Timeout};
use exec_server_protocol::process::{StartParams, TerminalSize};

use crate::{env, host};

/// Time from SIGTERM to SIGKILL after a timeout, unless the request sets it.
const TIMEOUT_GRACE: Duration = Duration::from_secs(2);

/// Validates a request and converts it to a spec; `own` is the environment that policies start
/// from. Takes the environment, the policy and the limits out of the request.
///
/// # Errors
///
/// The error names the invalid field: an empty command, a path of another platform, a terminal
/// without a size, or a policy that cannot be enforced.
pub fn spec(
    params: &mut StartParams,
    own: &BTreeMap<String, String>,
) -> Result<ProcessSpec, StartError> {
    if params.argv.is_empty() {
        return Err(StartError::EmptyArgv);
    }
    let cwd = params.cwd.to_native().map_err(|error| {
        let cwd = &params.cwd;
        StartError::Refused(format!(
            "cwd URI `{cwd}` is not valid on this exec-server host: {error}"
        ))
    })?;
    let overlay = std::mem::take(&mut params.env);
    let mut env = env::build(own, params.env_policy.as_ref(), overlay);
    if let Some(metadata) = &params.metadata {
        let ids = [
            ("CODEX_THREAD_ID", &metadata.thread_id),
            ("CODEX_TOOL_CALL_ID", &metadata.tool_call_id),
        ];
        for (name, id) in ids {
            if let Some(id) = id {
                env.insert(name.to_owned(), id.clone());
            }
        }
    }
    let stdio = if params.tty {
        add_shell(&mut env);
        Stdio::Terminal(params.size.map(size).transpose()?.unwrap_or_default())
    } else {
        Stdio::Pipes {
            stdin: params.pipe_stdin,
        }
    };
    Ok(ProcessSpec {
        argv: params.argv.clone(),
        cwd,
        env,
        arg0: params.arg0.take(),
        stdio,
        timeout: params.timeout_ms.map(|millis| Timeout {
            after: Duration::from_millis(millis),
            grace: params.grace_ms.map_or(TIMEOUT_GRACE, Duration::from_millis),
        }),
        limits: params.limits.take().unwrap_or_default(),
        retention: None,
        sandbox: params.sandbox.take(),
        // Without listeners this network has no connection to the outside; the caller adds
        // listeners if it provides one.
        network: params.enforce_managed_network.then(PrivateNetwork::default),
        list_descendants: params.list_descendants,
    })
}

/// Sets `SHELL`: programs on a terminal expect to find the user's shell there.
pub fn add_shell(env: &mut BTreeMap<String, String>) {
    if !env.contains_key("SHELL")
        && let Some(account) = host::account()
    {
        let shell = account.shell.to_string_lossy().into_owned();
        env.insert("SHELL".to_owned(), shell);
    }
}

/// Converts the size of a terminal, if it is valid.
///
/// # Errors
///
/// When a dimension is not between 1 and 65535.
pub fn size(size: TerminalSize) -> Result<PtySize, StartError> {
    let cells = |name: &str, value: u32| match u16::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(StartError::Refused(format!(
            "terminal {name} must be between 1 and 65535, not {value}"
        ))),
    };
    Ok(PtySize {
        rows: cells("rows", size.rows)?,
        cols: cells("cols", size.cols)?,
    })
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::PathUri;

    use super::*;

    fn params() -> StartParams {
        StartParams {
            argv: vec!["true".to_owned()],
            ..StartParams::default()
        }
    }

    fn refusal(mut params: StartParams) -> String {
        spec(&mut params, &BTreeMap::new()).unwrap_err().to_string()
    }

    #[test]
    fn invalid_start_parameters_are_rejected_by_name() {
        assert!(spec(&mut params(), &BTreeMap::new()).is_ok());
        let foreign = StartParams {
            cwd: PathUri::parse("file:///C:/x").unwrap(),
            ..params()
        };
        assert!(refusal(foreign).contains("`file:///C:/x`"));
        let flat = StartParams {
            tty: true,
            size: Some(TerminalSize { rows: 0, cols: 80 }),
            ..params()
        };
        assert!(refusal(flat).contains("rows must be between 1 and 65535, not 0"));
    }

    #[test]
    fn managed_network_without_listeners_is_isolated() {
        let free = spec(&mut params(), &BTreeMap::new()).unwrap();
        assert_eq!(free.network, None);
        let mut managed = StartParams {
            enforce_managed_network: true,
            ..params()
        };
        let network = spec(&mut managed, &BTreeMap::new()).unwrap().network;
        assert_eq!(network, Some(PrivateNetwork::default()));
    }

    #[test]
    fn caller_ids_are_set_in_the_environment() {
        let mut params = params();
        params.metadata = Some(exec_server_protocol::process::StartMetadata {
            thread_id: Some("t".to_owned()),
            tool_call_id: None,
        });
        let env = spec(&mut params, &BTreeMap::new()).unwrap().env;
        assert_eq!(
            env.into_iter().collect::<Vec<_>>(),
            [("CODEX_THREAD_ID".into(), "t".into())]
        );
    }
}
