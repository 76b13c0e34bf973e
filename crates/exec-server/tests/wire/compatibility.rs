//! The table of the compatible protocol: every method, field and flag, and the tests that cover it.
//!
//! `docs/compatibility.md` is generated from this table; a test fails if the page is out of date.
//! `UPDATE_DOCS=1` regenerates it. Each named test must exist, and a server must report the same.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use exec_server_testkit::wire::Transport;
use serde_json::{Value, json};

use crate::served;

/// Whether a part of the protocol is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Support {
    Served,
    /// Accepted, without effect, with the reason.
    Without(&'static str),
    /// Not supported, with the reason.
    Absent(&'static str),
}
use Support::{Absent, Served, Without};

/// A name, whether it is supported, and the tests that cover it.
type CoverageItem = (&'static str, Support, &'static [&'static str]);

/// Items of one table of the page.
type CoverageTable = (&'static str, &'static [CoverageItem]);

const FLAGS: &[CoverageItem] = &[
    (
        "capabilityDiscoverySandbox",
        Served,
        &["sandbox/requests::capability_discovery_applies_the_policy_of_each_root"],
    ),
    (
        "capabilityDiscoveryV2",
        Absent(
            "only if `client_config.discover_all` is set: it hides roots that the client has selected",
        ),
        &["wire/catalog::catalog_is_offered_only_if_a_setting_asks_for_it"],
    ),
    (
        "credentialMasking",
        Absent("refused: the server adds no credentials to requests"),
        &[],
    ),
    (
        "credentialMaskingCustomProviders",
        Absent("refused: the server adds no credentials to requests"),
        &[],
    ),
    (
        "environmentConfigRead",
        Served,
        &["wire/config::config_read_returns_layers_in_order_of_precedence"],
    ),
    (
        "fileWriteStreaming",
        Served,
        &["wire/fs/handles::blocks_written_through_a_handle_read_back_exactly"],
    ),
    (
        "fsWatchMissing",
        Served,
        &["wire/watch::watch_missing_notifies_once_when_a_path_appears"],
    ),
    (
        "httpHeaderEnvVars",
        Served,
        &["wire/http::http_header_values_come_from_the_environment_except_secrets"],
    ),
    (
        "linuxApprovedRootWritePreservesRestrictions",
        Absent("its meaning is not known well enough to promise it"),
        &[],
    ),
    (
        "linuxRootWritePreservesDevices",
        Served,
        &["interop::devices_stay_if_the_root_is_writable"],
    ),
    (
        "networkProxyLaunch",
        Served,
        &["sandbox/managed::allowed_hosts_are_reachable_through_every_proxy_protocol"],
    ),
    (
        "networkProxyReviewDomains",
        Served,
        &["sandbox/managed::network_capabilities_match_behaviour"],
    ),
    (
        "sandboxedFileStreaming",
        Served,
        &["sandbox/requests::handles_stream_files_under_a_policy"],
    ),
    (
        "shellSnapshotV2",
        Served,
        &["wire/snapshot::start_up_files_run_once_per_snapshot_scope"],
    ),
    ("windowsMxc", Absent("this server runs on Linux"), &[]),
];

const INFO: &[CoverageItem] = &[
    (
        "capabilities",
        Served,
        &["wire/compatibility::server_capabilities_match_the_table"],
    ),
    (
        "cwd",
        Served,
        &["wire/extensions::initialize_and_environment_info_return_the_same_environment"],
    ),
    (
        "executorVersion",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "platformOs",
        Served,
        &["wire/extensions::initialize_and_environment_info_return_the_same_environment"],
    ),
    (
        "prependPathDirs",
        Without("always empty: nothing is prepended to the `PATH` of commands"),
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "providerId",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "shell",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "tempDir",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "temporaryDirectories",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
    (
        "userHomeDir",
        Served,
        &["wire/compatibility::environment_info_has_exactly_the_fields_of_the_table"],
    ),
];

const METHODS: &[CoverageItem] = &[
    (
        "initialize",
        Served,
        &["wire/session::requests_before_the_handshake_completes_are_rejected"],
    ),
    (
        "environment/info",
        Served,
        &["wire/extensions::initialize_and_environment_info_return_the_same_environment"],
    ),
    (
        "environment/status",
        Served,
        &["wire/extensions::initialize_and_environment_info_return_the_same_environment"],
    ),
    (
        "environmentConfig/read",
        Served,
        &[
            "wire/config::config_read_returns_layers_in_order_of_precedence",
            "wire/config::config_read_error_names_file_line_and_column",
            "interop::real_client_offers_tools_of_the_server_configuration",
        ],
    ),
    (
        "process/start",
        Served,
        &[
            "wire/start::start_rejects_bad_argv_and_cwd_with_the_cause",
            "interop::command_runs_on_the_server",
        ],
    ),
    (
        "process/read",
        Served,
        &["wire/output::read_reports_evicted_bytes"],
    ),
    (
        "process/write",
        Served,
        &[
            "wire/input::write_repeated_with_the_same_id_is_written_once",
            "interop::terminal_session_receives_input",
        ],
    ),
    (
        "process/signal",
        Served,
        &[
            "wire/signal::signal_to_an_ended_or_unknown_process_is_no_error",
            "interop::interrupt_reaches_a_pipe_process",
        ],
    ),
    (
        "process/terminate",
        Served,
        &[
            "wire/terminate::forced_terminate_kills_and_reports_whether_it_was_running",
            "interop::running_process_ends_with_the_run",
        ],
    ),
    (
        "fs/readFile",
        Served,
        &["wire/fs/files::read_file_returns_what_write_file_wrote"],
    ),
    (
        "fs/writeFile",
        Served,
        &["wire/fs/files::write_file_keeps_owner_mode_and_links"],
    ),
    (
        "fs/open",
        Served,
        &["wire/fs/handles::open_rejects_missing_special_and_unsupported_files"],
    ),
    (
        "fs/readBlock",
        Served,
        &["wire/fs/handles::blocks_written_through_a_handle_read_back_exactly"],
    ),
    (
        "fs/writeBlock",
        Served,
        &["wire/fs/handles::blocks_written_through_a_handle_read_back_exactly"],
    ),
    (
        "fs/close",
        Served,
        &["wire/fs/handles::handles_are_limited_in_number_id_and_block_length"],
    ),
    (
        "fs/createDirectory",
        Served,
        &["wire/fs/trees::directory_tree_is_created_listed_walked_copied_moved_and_removed"],
    ),
    (
        "fs/getMetadata",
        Served,
        &["wire/fs/files::get_metadata_returns_all_fields"],
    ),
    (
        "fs/canonicalize",
        Served,
        &["wire/fs/faults::fs_errors_have_the_code_of_their_cause"],
    ),
    (
        "fs/readDirectory",
        Served,
        &["wire/fs/trees::directory_of_100000_entries_is_rejected_by_list_and_truncated_by_walk"],
    ),
    (
        "fs/walk",
        Served,
        &["wire/fs/trees::walk_visits_directories_in_a_link_loop_once"],
    ),
    (
        "fs/remove",
        Served,
        &["wire/fs/trees::directory_tree_is_created_listed_walked_copied_moved_and_removed"],
    ),
    (
        "fs/copy",
        Served,
        &["wire/fs/trees::copy_follows_no_links_and_rejects_copies_into_itself"],
    ),
    (
        "fs/watchMissing",
        Served,
        &["wire/watch::watch_missing_notifies_once_when_a_path_appears"],
    ),
    (
        "capabilityRoots/discoverV1",
        Served,
        &[
            "wire/capability::discovery_finds_plugins_and_skills",
            "wire/capability::discovery_limits_depth_file_size_root_size_and_directories",
        ],
    ),
    (
        "capabilities/discoverV2",
        Served,
        &[
            "wire/catalog::catalog_lists_installed_plugins_and_skills",
            "wire/interop::catalog_equals_that_of_the_real_server",
        ],
    ),
    (
        "http/request",
        Served,
        &[
            "wire/http::http_request_returns_status_headers_and_body",
            "interop::tools_over_http_are_reached_from_the_server",
        ],
    ),
];

const PARTS: &[CoverageTable] = &[
    ("Methods", METHODS),
    (
        "Notifications",
        &[
            (
                "initialized",
                Served,
                &["wire/session::requests_before_the_handshake_completes_are_rejected"],
            ),
            (
                "process/output",
                Served,
                &["wire/output::pushed_output_is_complete"],
            ),
            (
                "process/exited",
                Served,
                &["wire/output::exited_and_closed_report_status_usage_and_signal"],
            ),
            (
                "process/closed",
                Served,
                &["wire/terminate::closed_does_not_wait_for_a_grandchild_that_holds_the_output"],
            ),
            (
                "http/request/bodyDelta",
                Served,
                &["wire/http::http_body_is_streamed_after_the_response"],
            ),
            (
                "fs/missingChanged",
                Served,
                &["wire/watch::watch_missing_notifies_once_when_a_path_appears"],
            ),
            (
                "network/policyDecision",
                Served,
                &[
                    "sandbox/managed::denied_hosts_are_unreachable_through_every_proxy_protocol",
                    "interop::real_client_is_notified_of_network_decisions",
                ],
            ),
        ],
    ),
    (
        "Requests of the server",
        &[(
            "network/policyRequest",
            Served,
            &[
                "sandbox/managed::client_decides_about_hosts_without_a_rule",
                "sandbox/managed::late_missing_or_invalid_decisions_count_as_refusal",
                "interop::real_client_decides_about_an_unlisted_host",
            ],
        )],
    ),
    ("Flags: `capabilities` of `environment/info`", FLAGS),
    ("Fields of `environment/info`", INFO),
    (
        "Fields of `initialize`",
        &[
            (
                "clientName",
                Served,
                &["wire/session::requests_before_the_handshake_completes_are_rejected"],
            ),
            (
                "resumeSessionId",
                Served,
                &[
                    "wire/session::resume_after_a_disconnect_replays_missing_output",
                    "wire/session::resume_of_an_attached_session_is_rejected",
                ],
            ),
            (
                "environmentInfo (result)",
                Served,
                &["wire/extensions::initialize_and_environment_info_return_the_same_environment"],
            ),
        ],
    ),
    (
        "Fields of `process/start`",
        &[
            (
                "processId",
                Served,
                &["wire/command::command_and_process_ids_share_one_namespace"],
            ),
            (
                "argv",
                Served,
                &[
                    "wire/start::start_rejects_bad_argv_and_cwd_with_the_cause",
                    "wire/start::start_passes_one_megabyte_of_arguments",
                ],
            ),
            (
                "cwd",
                Served,
                &["wire/start::start_rejects_bad_argv_and_cwd_with_the_cause"],
            ),
            (
                "env",
                Served,
                &["sandbox/processes::arguments_and_environment_reach_the_sandboxed_command"],
            ),
            (
                "tty",
                Served,
                &["wire/terminal::terminal_output_passes_every_byte_unchanged"],
            ),
            (
                "arg0",
                Served,
                &["wire/start::arg0_changes_only_the_process_name"],
            ),
            (
                "pipeStdin",
                Served,
                &["wire/input::writes_reach_the_process_in_order"],
            ),
            (
                "envPolicy",
                Served,
                &[
                    "engine/src/env.rs::policies_filter_then_set_then_narrow",
                    "wire/snapshot::request_environment_overrides_start_up_files",
                ],
            ),
            (
                "sandbox",
                Served,
                &[
                    "sandbox/policies::workspace_policy_allows_writes_only_in_the_workspace",
                    "interop::sandboxed_command_writes_only_to_the_workspace",
                ],
            ),
            (
                "enforceManagedNetwork",
                Served,
                &[
                    "sandbox/managed::managed_network_has_no_route_beside_the_proxy",
                    "sandbox/managed::existing_proxy_of_the_environment_is_used",
                    "sandbox/policies::managed_network_without_a_usable_proxy_is_rejected",
                ],
            ),
            (
                "managedNetwork",
                Served,
                &["sandbox/managed::unix_sockets_are_reachable_only_with_the_option"],
            ),
            (
                "networkProxy",
                Served,
                &[
                    "sandbox/managed::environment_of_the_command_names_the_proxy",
                    "sandbox/managed::start_rejects_invalid_proxy_settings",
                    "interop::managed_network_allows_only_hosts_of_the_cli",
                ],
            ),
            (
                "shellSnapshot",
                Served,
                &[
                    "wire/snapshot::commands_see_the_same_state_with_and_without_a_snapshot",
                    "wire/snapshot::failed_snapshot_falls_back_to_an_ordinary_start",
                    "interop::start_up_files_run_once_for_the_real_client",
                ],
            ),
            (
                "metadata",
                Served,
                &["wire/compatibility::start_metadata_is_in_the_environment_of_the_command"],
            ),
            (
                "sandboxType (result)",
                Served,
                &["sandbox/policies::read_only_policy_denies_all_writes"],
            ),
        ],
    ),
    (
        "Fields of `process/read`",
        &[
            (
                "afterSeq",
                Served,
                &["wire/output::read_reports_evicted_bytes"],
            ),
            (
                "maxBytes",
                Served,
                &["backends/main::read_continues_after_a_cursor"],
            ),
            (
                "waitMs",
                Served,
                &["wire/input::a_thousand_long_polls_do_not_delay_other_requests"],
            ),
            (
                "chunks, nextSeq (result)",
                Served,
                &["backends/main::read_continues_after_a_cursor"],
            ),
            (
                "exited, exitCode, closed (result)",
                Served,
                &["wire/output::exited_and_closed_report_status_usage_and_signal"],
            ),
            (
                "failure (result)",
                Without("always null"),
                &["wire/output::exited_and_closed_report_status_usage_and_signal"],
            ),
            (
                "sandboxDenied (result)",
                Served,
                &["sandbox/attacks::attack_writing_outside_the_workspace_fails"],
            ),
        ],
    ),
    (
        "Fields of `process/write`",
        &[
            (
                "chunk",
                Served,
                &["wire/input::writes_reach_the_process_in_order"],
            ),
            (
                "writeId",
                Served,
                &["wire/input::write_repeated_with_the_same_id_is_written_once"],
            ),
            (
                "status (result)",
                Served,
                &[
                    "wire/input::close_stdin_reports_whether_input_was_open",
                    "wire/input::write_to_closed_input_reports_stdin_closed",
                ],
            ),
        ],
    ),
    (
        "Fields of `http/request`",
        &[
            (
                "method, url, requestId",
                Served,
                &["wire/http::http_request_rejects_invalid_params"],
            ),
            (
                "headers",
                Served,
                &["wire/http::http_request_returns_status_headers_and_body"],
            ),
            (
                "headers: valueEnvVar",
                Served,
                &["wire/http::http_header_values_come_from_the_environment_except_secrets"],
            ),
            (
                "bodyBase64",
                Served,
                &["wire/http::http_request_returns_status_headers_and_body"],
            ),
            (
                "timeoutMs",
                Served,
                &["wire/http::http_request_to_a_hanging_site_times_out_and_delays_nothing"],
            ),
            (
                "redirectPolicy",
                Served,
                &["wire/http::http_redirects_change_the_method_as_browsers_do"],
            ),
            (
                "streamResponse",
                Served,
                &["wire/http::http_body_is_streamed_after_the_response"],
            ),
            (
                "status, headers, bodyBase64 (result)",
                Served,
                &["wire/http::http_request_returns_status_headers_and_body"],
            ),
        ],
    ),
    (
        "Fields of `environmentConfig/read`",
        &[
            (
                "cwd, configPaths, requirementsPaths",
                Served,
                &["wire/config::config_read_rejects_invalid_paths"],
            ),
            (
                "userHomeDir, codexHomeDir, hostname, config, requirements (result)",
                Served,
                &["wire/config::config_read_returns_layers_in_order_of_precedence"],
            ),
            (
                "cloudInsertionIndex (result)",
                Served,
                &["wire/config::config_read_returns_layers_in_order_of_precedence"],
            ),
        ],
    ),
    (
        "Fields of `fs/*`",
        &[
            (
                "path",
                Served,
                &["wire/fs/faults::fs_methods_resolve_dot_dot_and_reject_foreign_paths"],
            ),
            (
                "followSymlinks",
                Served,
                &["wire/fs/faults::fs_errors_have_the_code_of_their_cause"],
            ),
            (
                "sandbox",
                Served,
                &[
                    "sandbox/requests::every_file_method_works_in_a_workspace",
                    "sandbox/requests::file_requests_cannot_read_denied_paths",
                ],
            ),
            (
                "recursive, force",
                Served,
                &["wire/fs/faults::fs_errors_have_the_code_of_their_cause"],
            ),
            (
                "mode of `fs/open`",
                Served,
                &["wire/fs/handles::blocks_written_through_a_handle_read_back_exactly"],
            ),
            (
                "options of `fs/walk`",
                Served,
                &["wire/fs/trees::walk_visits_directories_in_a_link_loop_once"],
            ),
            (
                "watchId, missing, present",
                Served,
                &["wire/watch::watch_missing_notifies_once_when_a_path_appears"],
            ),
        ],
    ),
    (
        "Sandbox context",
        &[
            (
                "permissions",
                Served,
                &["sandbox/policies::invalid_policies_are_rejected"],
            ),
            (
                "cwd, workspaceRoots, policyContext",
                Served,
                &["sandbox/policies::workspace_policy_allows_writes_only_in_the_workspace"],
            ),
            (
                "windowsSandboxLevel and the other keys for Windows",
                Without("of no meaning on Linux"),
                &["sandbox/policies::workspace_policy_allows_writes_only_in_the_workspace"],
            ),
        ],
    ),
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn render() -> String {
    let mut text = String::from(
        "# Compatibility\n\nEvery part of the protocol of `codex exec-server` 0.169, and the tests that cover it.\n\
         `crates/exec-server/tests/wire/compatibility.rs` generates this page; a test fails if the page is out of date. To regenerate it:\n\
         `UPDATE_DOCS=1 cargo test -p exec-server --test wire compatibility`. A test is named by its path below\n\
         `crates/exec-server/tests`; those of `interop` run with the real Codex (`make interop`, `make interop-matrix`).\n\
         They pass with 0.165 and 0.166 as well; 0.167 and 0.168 were never released. The differences that clients see:\n\n\
         - Servers up to 0.166 keep a session without a connection, and a closed process, for 30 s; 0.169 for 80 s. Clients up to\n\
         0.166 try to resume for 25 s, 0.169 for 45 s. This server keeps both for 80 s; our client tries for 45 s at least.\n\
         - Executors of 0.169 report with a payload of the handshake that the registry rejected their credentials; up to 0.166 they\n\
         only reset the stream. Our executor sends the payload, and our client understands both.\n\
         - The server of 0.165 lacks `fs/watchMissing`, and our client reports that\n\
         (`interop::our_client_watches_missing_paths_on_the_real_server`).\n\nWhat this server adds is in [wire.md](wire.md).\n",
    );
    for (title, items) in PARTS {
        let _ = write!(
            text,
            "\n## {title}\n\n| name | supported | covered by |\n|---|---|---|\n"
        );
        for (name, state, tests) in *items {
            let state = match state {
                Served => "yes".to_owned(),
                Without(why) => format!("yes: {why}"),
                Absent(why) => format!("no: {why}"),
            };
            let tests: Vec<String> = tests.iter().map(|test| format!("`{test}`")).collect();
            let _ = writeln!(text, "| `{name}` | {state} | {} |", tests.join(", "));
        }
    }
    text
}

#[test]
fn compatibility_page_is_up_to_date() {
    let path = repository().join("docs/compatibility.md");
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &rendered).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == rendered,
        "docs/compatibility.md is out of date; run this test with UPDATE_DOCS=1 to regenerate it"
    );
}

/// The source files that may contain a test, and its name.
fn source_files(test: &str) -> (Vec<PathBuf>, &str) {
    let (module, name) = test.rsplit_once("::").unwrap();
    let crates = repository().join("crates");
    let files = if module == "interop" {
        vec![
            crates.join("exec-server/tests/interop.rs"),
            crates.join("testkit/src/interop.rs"),
        ]
    } else if module.ends_with(".rs") {
        vec![crates.join(module)]
    } else {
        vec![
            crates
                .join("exec-server/tests")
                .join(format!("{module}.rs")),
        ]
    };
    (files, name)
}

#[test]
fn every_test_named_in_the_table_exists() {
    let mut seen = 0;
    for (title, items) in PARTS {
        for (name, state, tests) in *items {
            assert!(
                !tests.is_empty() || matches!(state, Absent(_)),
                "{title}: no test covers `{name}`"
            );
            for test in *tests {
                let (files, function) = source_files(test);
                let sources = files
                    .iter()
                    .filter_map(|file| std::fs::read_to_string(file).ok());
                let declared = format!("fn {function}(");
                let found = sources.into_iter().any(|source| source.contains(&declared));
                assert!(
                    found,
                    "{title}: `{name}` names the test {test}, which does not exist"
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 80);
}

#[tokio::test]
async fn server_capabilities_match_the_table() {
    let (_server, client) = served(Transport::Websocket).await;
    let flags = client.session["environmentInfo"]["capabilities"].clone();
    let expected: serde_json::Map<String, Value> = FLAGS
        .iter()
        .map(|(name, state, _)| ((*name).to_owned(), json!(*state == Served)))
        .collect();
    assert_eq!(flags, Value::Object(expected));
}

#[tokio::test]
async fn server_methods_match_the_table() {
    let (_server, mut client) = served(Transport::Websocket).await;
    for (method, state, _) in METHODS {
        // No method takes these params: a server that knows the method rejects them.
        let refused = client.refused(method, json!([[[]]])).await;
        let unknown = refused.code == -32601;
        assert_eq!(unknown, matches!(state, Absent(_)), "{method}: {refused}");
    }
}

#[tokio::test]
async fn environment_info_has_exactly_the_fields_of_the_table() {
    let (_server, client) = served(Transport::Websocket).await;
    let info = client.session["environmentInfo"].clone();
    let mut fields: Vec<&str> = exec_server_testkit::wire::fields(&info);
    fields.retain(|name| *name != "extensions");
    fields.sort_unstable();
    let expected: Vec<&str> = INFO.iter().map(|(name, ..)| *name).collect();
    assert_eq!(fields, expected);
    assert_eq!(info["executorVersion"], env!("CARGO_PKG_VERSION"));
    let provider = info["providerId"].as_str().unwrap();
    assert!(
        provider.starts_with("sha256:") && provider.len() == 71,
        "{provider}"
    );
    assert!(Path::new(info["shell"]["path"].as_str().unwrap()).exists());
    assert_eq!(info["prependPathDirs"], json!([]));
    assert_eq!(info["tempDir"], "file:///tmp");
    assert_eq!(info["temporaryDirectories"], json!([]));
    assert!(
        info["userHomeDir"]
            .as_str()
            .unwrap()
            .starts_with("file:///")
    );
    let (_again, again) = served(Transport::Websocket).await;
    assert_eq!(again.session["environmentInfo"]["providerId"], provider);
}

#[tokio::test]
async fn start_metadata_is_in_the_environment_of_the_command() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let print = "echo \"${CODEX_THREAD_ID-none} ${CODEX_TOOL_CALL_ID-none}\"";
    let thread = "01a1dfe5-c8f0-7ad0-8746-026712158cea";
    for (metadata, expected) in [
        (Value::Null, "none none\n".to_owned()),
        (json!({}), "none none\n".to_owned()),
        (json!({"threadId": thread}), format!("{thread} none\n")),
        (
            json!({"threadId": thread, "toolCallId": "c 1", "more": 1}),
            format!("{thread} c 1\n"),
        ),
        (
            json!({"threadId": null, "toolCallId": "c"}),
            "none c\n".to_owned(),
        ),
    ] {
        let id = format!("with {metadata}");
        let start =
            exec_server_testkit::wire::StartBuilder::sh(&id, print).with("metadata", metadata);
        assert_eq!(client.run(start).await.text("stdout"), expected);
    }
}
