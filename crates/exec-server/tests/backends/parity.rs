//! Cases in which an error, a policy or a limit decides: each backend gives the same result.

pub(crate) mod cases {
    use std::path::Path;

    use exec_server::protocol::environment::Shell;
    use exec_server::protocol::fs::{
        FsRequest, FsResponse, GetMetadataParams, ReadFileParams, WriteFileParams,
    };
    use exec_server::protocol::network::NetworkProxy;
    use exec_server::protocol::process::{SandboxType, ShellSnapshot, StartParams, WaitUntil};
    use exec_server::protocol::sandbox::{EnforcementLevel, Sandbox};
    use exec_server::protocol::{PathUri, codes};
    use exec_server::{CollectOptions, ExecProcessEvent};
    use serde_json::{Value, json};
    use tempfile::TempDir;

    use crate::subjects::{BackendSubject, command, exited, sh};

    /// A policy that allows reading everything and writing below these directories.
    fn policy(writable: &[&Path]) -> Sandbox {
        let root =
            json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
        let mut entries = vec![root];
        entries.extend(writable.iter().map(|path| {
            let path = json!({"type": "path", "path": uri(path)});
            json!({"path": path, "access": "write"})
        }));
        managed(entries)
    }

    /// A policy that allows reading and writing below a directory only.
    fn only(directory: &Path) -> Sandbox {
        let path = json!({"type": "path", "path": uri(directory)});
        managed(vec![json!({"path": path, "access": "write"})])
    }

    fn managed(entries: Vec<Value>) -> Sandbox {
        serde_json::from_value(json!({
            "permissions": {
                "type": "managed",
                "file_system": {"type": "restricted", "entries": entries},
                "network": "restricted",
            },
            "windowsSandboxLevel": "disabled",
        }))
        .unwrap()
    }

    /// A directory whose path contains no link.
    fn directory() -> TempDir {
        let base = std::env::temp_dir().canonicalize().unwrap();
        tempfile::tempdir_in(base).unwrap()
    }

    fn uri(path: &Path) -> PathUri {
        PathUri::from_native(path).unwrap()
    }

    fn read(path: &Path, sandbox: Option<Sandbox>) -> FsRequest {
        FsRequest::ReadFile(ReadFileParams {
            path: uri(path),
            follow_symlinks: true,
            sandbox,
        })
    }

    fn write(path: &Path, sandbox: Option<Sandbox>) -> FsRequest {
        FsRequest::WriteFile(WriteFileParams {
            path: uri(path),
            data_base64: b"new".to_vec().into(),
            follow_symlinks: true,
            sandbox,
            mode: None,
            modified_at_ms: None,
            create_mode: None,
            owner: None,
        })
    }

    async fn refusal(subject: &BackendSubject, params: StartParams) -> (Option<i64>, String) {
        let error = subject.backend.start(params).await.unwrap_err();
        (error.code(), error.to_string())
    }

    pub(crate) async fn sandboxed_start_enforces_its_policy(subject: BackendSubject) {
        let directory = directory();
        let inside = directory.path().join("inside");
        std::fs::create_dir(&inside).unwrap();
        let script = "echo x >inside/f && ! echo x >outside && cat inside/f";
        let started = subject
            .backend
            .start(StartParams {
                cwd: uri(directory.path()),
                sandbox: Some(policy(&[&inside])),
                ..sh(script)
            })
            .await
            .unwrap();
        assert_eq!(started.sandbox_type, Some(SandboxType::LinuxSeccomp));
        let level = started.enforcement.map(|enforcement| enforcement.level);
        assert_eq!(level, Some(EnforcementLevel::Full));
        let output = started.process.output(CollectOptions::default());
        let output = output.await.unwrap();
        assert_eq!(output.stdout, b"x\n");
        assert_eq!(output.exit.unwrap().exit_code, 0);
        assert!(!directory.path().join("outside").exists());

        let free = subject.backend.start(sh("true")).await.unwrap();
        assert_eq!(free.sandbox_type, Some(SandboxType::None));
        assert!(free.enforcement.is_none());
    }

    pub(crate) async fn sandboxed_start_that_fails_has_code_and_path(subject: BackendSubject) {
        let missing = StartParams {
            sandbox: Some(policy(&[])),
            ..command(&["/no/such/program"])
        };
        let (code, text) = refusal(&subject, missing).await;
        assert_eq!(code, Some(codes::INTERNAL), "{text}");
        assert!(text.contains("`/no/such/program`"), "{text}");
        let relative = StartParams {
            sandbox: Some(managed(vec![json!({
                "path": {"type": "glob_pattern", "pattern": "/["}, "access": "deny",
            })])),
            ..command(&["true"])
        };
        let (code, text) = refusal(&subject, relative).await;
        assert_eq!(code, Some(codes::INVALID_PARAMS), "{text}");
    }

    pub(crate) async fn sandboxed_file_calls_enforce_their_policy(subject: BackendSubject) {
        let (allowed, denied) = (directory(), directory());
        let sandbox = only(allowed.path());
        for directory in [&allowed, &denied] {
            std::fs::write(directory.path().join("f"), "old").unwrap();
        }
        let inside = allowed.path().join("f");
        let response = subject.files.call(read(&inside, Some(sandbox.clone())));
        let FsResponse::ReadFile(found) = response.await.unwrap() else {
            panic!("another response");
        };
        assert_eq!(found.data_base64.as_slice(), b"old");
        let written = subject.files.call(write(&inside, Some(sandbox.clone())));
        written.await.unwrap();
        assert_eq!(std::fs::read(&inside).unwrap(), b"new");
        // The policy hides the other directory.
        let outside = denied.path().join("f");
        let requests = [
            read(&outside, Some(sandbox.clone())),
            write(&outside, Some(sandbox.clone())),
            FsRequest::GetMetadata(GetMetadataParams {
                path: uri(&outside),
                follow_symlinks: true,
                sandbox: Some(sandbox),
            }),
        ];
        for request in requests {
            let error = subject.files.call(request.clone()).await.unwrap_err();
            assert_eq!(error.code(), Some(codes::NOT_FOUND), "{request:?}: {error}");
        }
        assert_eq!(std::fs::read(&outside).unwrap(), b"old");
        // A policy that allows reading everything still refuses writes.
        let error = subject.files.call(write(&inside, Some(policy(&[]))));
        let error = error.await.unwrap_err();
        assert_eq!(error.code(), Some(codes::INTERNAL), "{error}");
        assert_eq!(std::fs::read(&inside).unwrap(), b"new");
    }

    pub(crate) async fn file_errors_have_code_and_path(subject: BackendSubject) {
        let directory = directory();
        let missing = directory.path().join("missing");
        let error = subject.files.call(read(&missing, None)).await.unwrap_err();
        assert_eq!(error.code(), Some(codes::NOT_FOUND), "{error}");
        assert!(error.to_string().contains("missing"), "{error}");
        let error = subject.files.call(read(directory.path(), None)).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Some(codes::INVALID_REQUEST), "{error}");
        let foreign = FsRequest::ReadFile(ReadFileParams {
            path: PathUri::parse("file:///C:/x").unwrap(),
            follow_symlinks: true,
            sandbox: None,
        });
        let error = subject.files.call(foreign).await.unwrap_err();
        assert_eq!(error.code(), Some(codes::INVALID_REQUEST), "{error}");
        let dynamic = managed(vec![json!({
            "path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write",
        })]);
        let error = subject.files.call(write(&missing, Some(dynamic))).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Some(codes::INVALID_PARAMS), "{error}");
        assert!(error.to_string().contains("requires cwd"), "{error}");
    }

    fn proxy(decision_timeout: Option<u64>) -> NetworkProxy {
        serde_json::from_value(json!({
            "proxy": {
                "enabled": true,
                "enableSocks5": false,
                "enableSocks5Udp": false,
                "allowUpstreamProxy": false,
                "dangerouslyAllowAllUnixSockets": false,
                "allowLocalBinding": false,
                "mode": "full",
                "domains": {"example.invalid": "allow"},
            },
            "policyDecisionTimeoutMs": decision_timeout,
        }))
        .unwrap()
    }

    pub(crate) async fn process_network_is_prepared_and_validated(subject: BackendSubject) {
        let params = StartParams {
            network_proxy: Some(proxy(None)),
            enforce_managed_network: true,
            ..sh("echo \"$HTTP_PROXY\"; test -n \"$HTTP_PROXY\"")
        };
        let process = subject.start(params).await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 0);
        let variable = String::from_utf8(output.stdout).unwrap();
        assert!(variable.starts_with("http://127.0.0.1:"), "{variable}");

        let no_proxy = StartParams {
            enforce_managed_network: true,
            ..command(&["true"])
        };
        let (code, text) = refusal(&subject, no_proxy).await;
        assert_eq!(code, Some(codes::INVALID_PARAMS), "{text}");
        assert!(text.contains("requires proxy environment"), "{text}");
        let no_time = StartParams {
            network_proxy: Some(proxy(Some(0))),
            ..command(&["true"])
        };
        let (code, text) = refusal(&subject, no_time).await;
        assert_eq!(code, Some(codes::INVALID_PARAMS), "{text}");
        assert!(text.contains("timeout must be nonzero"), "{text}");
    }

    pub(crate) async fn shell_snapshot_is_validated_and_used(subject: BackendSubject) {
        let snapshot = |scope: &str| {
            Some(ShellSnapshot {
                scope_id: scope.to_owned(),
                shell: Shell {
                    name: "sh".to_owned(),
                    path: "/bin/sh".to_owned(),
                },
            })
        };
        let (code, text) = refusal(
            &subject,
            StartParams {
                shell_snapshot: snapshot(""),
                ..command(&["/bin/sh", "-lc", "true"])
            },
        )
        .await;
        assert_eq!(code, Some(codes::INVALID_PARAMS), "{text}");
        let process = subject
            .start(StartParams {
                shell_snapshot: snapshot("scope"),
                ..command(&["/bin/sh", "-lc", "echo $((6 * 7))"])
            })
            .await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout, b"42\n");
    }

    /// Lines of the process whose output is not read: 23 MB, more than a connection may buffer for it.
    const STALLED_LINES: usize = 3_000_000;
    const LIVE_LINES: usize = 200_000;

    /// Bytes that `seq 1 LINES` prints.
    fn printed(lines: usize) -> u64 {
        let digits = |n: usize| u64::from(n.ilog10()) + 2;
        (1..=lines).map(digits).sum()
    }

    /// Reads all events of a process; returns the number of bytes, and whether nothing was lost.
    async fn drain(mut events: exec_server::ExecProcessEvents) -> (u64, bool) {
        let (mut bytes, mut complete) = (0, true);
        let mut next = 1;
        while let Some(event) = events.recv().await {
            match event {
                ExecProcessEvent::Output { seq, chunk, .. } => {
                    complete &= seq == next;
                    bytes += chunk.len() as u64;
                }
                ExecProcessEvent::Exited { .. } => {}
                ExecProcessEvent::Closed { .. } => return (bytes, complete),
                other => panic!("{other:?}"),
            }
            next += 1;
        }
        (bytes, false)
    }

    pub(crate) async fn stalled_consumer_delays_no_other_process_and_loses_nothing(
        subject: BackendSubject,
    ) {
        let stalled = subject.start(sh(&format!("seq 1 {STALLED_LINES}"))).await;
        let unread = stalled.events().unwrap();
        let mut live = Vec::new();
        for _ in 0..9 {
            let process = subject.start(sh(&format!("seq 1 {LIVE_LINES}"))).await;
            let events = process.events().unwrap();
            live.push((process, tokio::spawn(drain(events))));
        }
        for (process, drained) in live {
            assert_eq!(drained.await.unwrap(), (printed(LIVE_LINES), true));
            assert_eq!(exited(&*process).await.exit_code, 0);
        }
        // Calls of the session are answered, too.
        let listed = subject.backend.list().await.unwrap();
        assert!(
            listed
                .iter()
                .any(|one| one.process_id == stalled.process_id())
        );
        stalled.snapshot(Some(10)).await.unwrap();
        assert_eq!(drain(unread).await, (printed(STALLED_LINES), true));
    }

    pub(crate) async fn dropped_stalled_consumer_lets_the_process_end(subject: BackendSubject) {
        let process = subject.start(sh(&format!("seq 1 {STALLED_LINES}"))).await;
        let unread = process.events().unwrap();
        let other = subject.start(sh("seq 1 100000")).await;
        let drained = drain(other.events().unwrap()).await;
        assert_eq!(drained, (printed(100_000), true));
        drop(unread);
        let done = process.wait(WaitUntil::Closed, None).await.unwrap();
        assert!(done.closed);
    }
}
