//! The table of the compatible wire: every method, field and flag, and the test that shows it.
//!
//! `docs/compatibility.md` is written from here, and a stale one fails; `UPDATE_DOCS=1` writes it
//! anew. Tests that are named must be there, and a server must say of itself what the table does.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use exec_server_testkit::wire::Transport;
use serde_json::{Value, json};

use crate::served;

/// What becomes of a part of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Served,
    /// Understood, and nothing follows from it; why.
    Without(&'static str),
    /// Not offered; why.
    Absent(&'static str),
}
use State::{Absent, Served, Without};

/// A name, what becomes of it, and the tests that show it.
type Item = (&'static str, State, &'static [&'static str]);

/// Items that belong together.
type Part = (&'static str, &'static [Item]);

const FLAGS: &[Item] = &[
    (
        "capabilityDiscoverySandbox",
        Served,
        &["sandbox/requests::discovery_obeys_the_policy_of_each_root"],
    ),
    (
        "capabilityDiscoveryV2",
        Absent("it would hide roots that the client has selected"),
        &[],
    ),
    (
        "credentialMasking",
        Absent("refused: no credentials are put into requests"),
        &[],
    ),
    (
        "credentialMaskingCustomProviders",
        Absent("refused: no credentials are put into requests"),
        &[],
    ),
    (
        "environmentConfigRead",
        Served,
        &["wire/config::layers_are_selected_in_order"],
    ),
    (
        "fileWriteStreaming",
        Served,
        &["wire/fs/handles::blocks_go_both_ways"],
    ),
    (
        "fsWatchMissing",
        Served,
        &["wire/watch::what_is_missing_is_told_once"],
    ),
    (
        "httpHeaderEnvVars",
        Served,
        &["wire/http::header_values_come_from_the_environment_but_not_secrets"],
    ),
    (
        "linuxApprovedRootWritePreservesRestrictions",
        Absent("its meaning is not known well enough to promise it"),
        &[],
    ),
    (
        "linuxRootWritePreservesDevices",
        Absent("its meaning is not known well enough to promise it"),
        &[],
    ),
    (
        "networkProxyLaunch",
        Served,
        &["sandbox/managed::allowed_hosts_are_reached_in_every_way"],
    ),
    (
        "networkProxyReviewDomains",
        Served,
        &["sandbox/managed::flags_say_what_works"],
    ),
    (
        "sandboxedFileStreaming",
        Served,
        &["sandbox/requests::files_are_streamed"],
    ),
    (
        "shellSnapshotV2",
        Served,
        &["wire/snapshot::start_up_files_run_once_per_scope"],
    ),
    ("windowsMxc", Absent("this server runs on Linux"), &[]),
];

const INFO: &[Item] = &[
    (
        "capabilities",
        Served,
        &["wire/compatibility::flags_are_what_the_table_says"],
    ),
    (
        "cwd",
        Served,
        &["wire/extensions::both_answers_describe_the_environment_alike"],
    ),
    (
        "executorVersion",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "platformOs",
        Served,
        &["wire/extensions::both_answers_describe_the_environment_alike"],
    ),
    (
        "prependPathDirs",
        Without("always empty: nothing is put before the `PATH` of commands"),
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "providerId",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "shell",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "tempDir",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "temporaryDirectories",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
    (
        "userHomeDir",
        Served,
        &["wire/compatibility::a_server_describes_itself"],
    ),
];

const METHODS: &[Item] = &[
    (
        "initialize",
        Served,
        &["wire/session::handshake_keeps_its_order"],
    ),
    (
        "environment/info",
        Served,
        &["wire/extensions::both_answers_describe_the_environment_alike"],
    ),
    (
        "environment/status",
        Served,
        &["wire/extensions::both_answers_describe_the_environment_alike"],
    ),
    (
        "environmentConfig/read",
        Served,
        &[
            "wire/config::layers_are_selected_in_order",
            "wire/config::broken_files_are_named_with_line_and_column",
            "interop::tools_in_configuration_of_the_server_are_offered",
        ],
    ),
    (
        "process/start",
        Served,
        &[
            "wire/start::what_cannot_be_started_says_why",
            "interop::command_runs_on_the_server",
        ],
    ),
    (
        "process/read",
        Served,
        &["wire/output::reading_says_what_is_missing"],
    ),
    (
        "process/write",
        Served,
        &[
            "wire/input::a_repeated_write_is_written_once",
            "interop::terminal_session_receives_input",
        ],
    ),
    (
        "process/signal",
        Served,
        &[
            "wire/signal::nobody_to_signal_is_no_error",
            "interop::interrupt_reaches_a_pipe_process",
        ],
    ),
    (
        "process/terminate",
        Served,
        &[
            "wire/terminate::force_is_at_once_and_tells_what_was",
            "interop::running_process_ends_with_the_run",
        ],
    ),
    (
        "fs/readFile",
        Served,
        &["wire/fs/files::whole_files_come_and_go"],
    ),
    (
        "fs/writeFile",
        Served,
        &["wire/fs/files::writing_keeps_owner_mode_and_links"],
    ),
    (
        "fs/open",
        Served,
        &["wire/fs/handles::what_cannot_be_opened"],
    ),
    (
        "fs/readBlock",
        Served,
        &["wire/fs/handles::blocks_go_both_ways"],
    ),
    (
        "fs/writeBlock",
        Served,
        &["wire/fs/handles::blocks_go_both_ways"],
    ),
    (
        "fs/close",
        Served,
        &["wire/fs/handles::the_limits_of_handles"],
    ),
    (
        "fs/createDirectory",
        Served,
        &["wire/fs/trees::a_tree_is_made_listed_walked_copied_moved_and_removed"],
    ),
    (
        "fs/getMetadata",
        Served,
        &["wire/fs/files::metadata_says_all_there_is"],
    ),
    (
        "fs/canonicalize",
        Served,
        &["wire/fs/faults::every_error_has_its_code"],
    ),
    (
        "fs/readDirectory",
        Served,
        &["wire/fs/trees::a_hundred_thousand_entries"],
    ),
    (
        "fs/walk",
        Served,
        &["wire/fs/trees::a_loop_of_directories_is_walked_once"],
    ),
    (
        "fs/remove",
        Served,
        &["wire/fs/trees::a_tree_is_made_listed_walked_copied_moved_and_removed"],
    ),
    (
        "fs/copy",
        Served,
        &["wire/fs/trees::copies_neither_follow_nor_go_round"],
    ),
    (
        "fs/watchMissing",
        Served,
        &["wire/watch::what_is_missing_is_told_once"],
    ),
    (
        "capabilityRoots/discoverV1",
        Served,
        &[
            "wire/capability::plugins_and_skills_are_found",
            "wire/capability::everything_has_a_limit",
        ],
    ),
    (
        "capabilities/discoverV2",
        Absent("it would hide roots that the client has selected"),
        &["wire/order::unknown_methods_are_named"],
    ),
    (
        "http/request",
        Served,
        &[
            "wire/http::a_request_brings_status_headers_and_body",
            "interop::tools_over_http_are_reached_from_the_server",
        ],
    ),
];

const PARTS: &[Part] = &[
    ("Methods", METHODS),
    (
        "Notifications",
        &[
            (
                "initialized",
                Served,
                &["wire/session::handshake_keeps_its_order"],
            ),
            (
                "process/output",
                Served,
                &["wire/output::pushing_loses_nothing"],
            ),
            (
                "process/exited",
                Served,
                &["wire/output::the_end_says_how_it_was"],
            ),
            (
                "process/closed",
                Served,
                &["wire/terminate::closed_does_not_wait_for_a_grandchild"],
            ),
            (
                "http/request/bodyDelta",
                Served,
                &["wire/http::a_body_is_streamed_after_the_answer"],
            ),
            (
                "fs/missingChanged",
                Served,
                &["wire/watch::what_is_missing_is_told_once"],
            ),
            (
                "network/policyDecision",
                Served,
                &[
                    "sandbox/managed::denied_hosts_are_reached_in_none",
                    "interop::the_real_client_is_told_of_decisions",
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
                "sandbox/managed::clients_are_asked_about_misses",
                "sandbox/managed::late_missing_and_strange_answers_are_no",
                "interop::the_real_client_is_asked_about_a_host",
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
                &["wire/session::handshake_keeps_its_order"],
            ),
            (
                "resumeSessionId",
                Served,
                &[
                    "wire/session::a_client_that_vanishes_midstream_resumes_without_a_gap",
                    "wire/session::an_attached_session_is_not_given_away",
                ],
            ),
            (
                "environmentInfo (result)",
                Served,
                &["wire/extensions::both_answers_describe_the_environment_alike"],
            ),
        ],
    ),
    (
        "Fields of `process/start`",
        &[
            (
                "processId",
                Served,
                &["wire/command::ids_are_shared_with_processes"],
            ),
            (
                "argv",
                Served,
                &[
                    "wire/start::what_cannot_be_started_says_why",
                    "wire/start::a_megabyte_of_arguments_arrives",
                ],
            ),
            (
                "cwd",
                Served,
                &["wire/start::what_cannot_be_started_says_why"],
            ),
            (
                "env",
                Served,
                &["sandbox/processes::arguments_and_environment_arrive"],
            ),
            ("tty", Served, &["wire/terminal::every_byte_passes_through"]),
            (
                "arg0",
                Served,
                &["wire/start::arg0_changes_the_name_and_nothing_else"],
            ),
            (
                "pipeStdin",
                Served,
                &["wire/input::two_hundred_writes_keep_their_order"],
            ),
            (
                "envPolicy",
                Served,
                &[
                    "executor/src/env.rs::policies_filter_then_set_then_narrow",
                    "wire/snapshot::the_request_and_its_policy_win_over_start_up_files",
                ],
            ),
            (
                "sandbox",
                Served,
                &[
                    "sandbox/policies::a_workspace_is_written_to",
                    "interop::sandboxed_command_writes_only_to_the_workspace",
                ],
            ),
            (
                "enforceManagedNetwork",
                Served,
                &[
                    "sandbox/managed::there_is_no_other_way_out",
                    "sandbox/managed::a_proxy_that_is_there_already_is_led_to",
                    "sandbox/policies::managed_networks_fail_closed",
                ],
            ),
            (
                "managedNetwork",
                Served,
                &["sandbox/managed::sockets_of_files_are_opened_only_when_asked_for"],
            ),
            (
                "networkProxy",
                Served,
                &[
                    "sandbox/managed::children_are_told_of_their_proxy",
                    "sandbox/managed::what_makes_no_sense_is_refused",
                    "interop::managed_network_allows_only_hosts_of_the_cli",
                ],
            ),
            (
                "shellSnapshot",
                Served,
                &[
                    "wire/snapshot::commands_cannot_tell",
                    "wire/snapshot::what_goes_wrong_means_an_ordinary_run",
                    "interop::shell_start_up_files_run_once_per_conversation",
                ],
            ),
            (
                "metadata",
                Served,
                &["wire/compatibility::metadata_is_shown_to_the_command"],
            ),
            (
                "sandboxType (result)",
                Served,
                &["sandbox/policies::reading_everything_writes_nothing"],
            ),
        ],
    ),
    (
        "Fields of `process/read`",
        &[
            (
                "afterSeq",
                Served,
                &["wire/output::reading_says_what_is_missing"],
            ),
            ("maxBytes", Served, &["backends/main::reads_with_cursors"]),
            (
                "waitMs",
                Served,
                &["wire/input::long_polls_hold_up_nothing"],
            ),
            (
                "chunks, nextSeq (result)",
                Served,
                &["backends/main::reads_with_cursors"],
            ),
            (
                "exited, exitCode, closed (result)",
                Served,
                &["wire/output::the_end_says_how_it_was"],
            ),
            (
                "failure (result)",
                Without("always null"),
                &["wire/output::the_end_says_how_it_was"],
            ),
            (
                "sandboxDenied (result)",
                Served,
                &["sandbox/attacks::writing_outside"],
            ),
        ],
    ),
    (
        "Fields of `process/write`",
        &[
            (
                "chunk",
                Served,
                &["wire/input::two_hundred_writes_keep_their_order"],
            ),
            (
                "writeId",
                Served,
                &["wire/input::a_repeated_write_is_written_once"],
            ),
            (
                "status (result)",
                Served,
                &[
                    "wire/input::ends_have_a_status",
                    "wire/input::a_write_to_a_dead_input_is_told",
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
                &["wire/http::what_cannot_be_asked_is_refused"],
            ),
            (
                "headers",
                Served,
                &["wire/http::a_request_brings_status_headers_and_body"],
            ),
            (
                "headers: valueEnvVar",
                Served,
                &["wire/http::header_values_come_from_the_environment_but_not_secrets"],
            ),
            (
                "bodyBase64",
                Served,
                &["wire/http::a_request_brings_status_headers_and_body"],
            ),
            (
                "timeoutMs",
                Served,
                &["wire/http::a_site_that_hangs_holds_up_nobody_and_times_out"],
            ),
            (
                "redirectPolicy",
                Served,
                &["wire/http::redirects_are_followed_as_browsers_do"],
            ),
            (
                "streamResponse",
                Served,
                &["wire/http::a_body_is_streamed_after_the_answer"],
            ),
            (
                "status, headers, bodyBase64 (result)",
                Served,
                &["wire/http::a_request_brings_status_headers_and_body"],
            ),
        ],
    ),
    (
        "Fields of `environmentConfig/read`",
        &[
            (
                "cwd, configPaths, requirementsPaths",
                Served,
                &["wire/config::what_cannot_be_asked_is_refused"],
            ),
            (
                "userHomeDir, codexHomeDir, hostname, config, requirements (result)",
                Served,
                &["wire/config::layers_are_selected_in_order"],
            ),
            (
                "cloudInsertionIndex (result)",
                Served,
                &["wire/config::layers_are_selected_in_order"],
            ),
        ],
    ),
    (
        "Fields of `fs/*`",
        &[
            ("path", Served, &["wire/fs/faults::paths_that_lead_nowhere"]),
            (
                "followSymlinks",
                Served,
                &["wire/fs/faults::every_error_has_its_code"],
            ),
            (
                "sandbox",
                Served,
                &[
                    "sandbox/requests::every_method_works_in_a_workspace",
                    "sandbox/requests::reading_obeys_denials",
                ],
            ),
            (
                "recursive, force",
                Served,
                &["wire/fs/faults::every_error_has_its_code"],
            ),
            (
                "mode of `fs/open`",
                Served,
                &["wire/fs/handles::blocks_go_both_ways"],
            ),
            (
                "options of `fs/walk`",
                Served,
                &["wire/fs/trees::a_loop_of_directories_is_walked_once"],
            ),
            (
                "watchId, missing, present",
                Served,
                &["wire/watch::what_is_missing_is_told_once"],
            ),
        ],
    ),
    (
        "Sandbox context",
        &[
            (
                "permissions",
                Served,
                &["sandbox/policies::policies_that_are_none_are_refused"],
            ),
            (
                "cwd, workspaceRoots, policyContext",
                Served,
                &["sandbox/policies::a_workspace_is_written_to"],
            ),
            (
                "windowsSandboxLevel and the other keys for Windows",
                Without("of no meaning on Linux"),
                &["sandbox/policies::a_workspace_is_written_to"],
            ),
        ],
    ),
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn render() -> String {
    let mut text = String::from(
        "# Compatibility\n\nThe wire of `codex exec-server` 0.166, part by part, and the tests that show what this server makes of it.\n\
         Written by `crates/exec-server/tests/wire/compatibility.rs`, which fails when this page is stale; to write it anew:\n\
         `UPDATE_DOCS=1 cargo test -p exec-server --test wire compatibility`. A test is named by its place below\n\
         `crates/exec-server/tests`; those of `interop` run with the real Codex (`make interop`, `make interop-matrix`).\n\
         They pass with 0.165 as well, whose server differs in one thing: it has no `fs/watchMissing`, and our client says so\n\
         (`interop::our_client_watches_for_what_is_missing`). What this server adds is in [wire.md](wire.md).\n",
    );
    for (title, items) in PARTS {
        let _ = write!(
            text,
            "\n## {title}\n\n| name | here | shown by |\n|---|---|---|\n"
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
fn the_document_is_not_stale() {
    let path = repository().join("docs/compatibility.md");
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &rendered).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == rendered,
        "docs/compatibility.md is stale; UPDATE_DOCS=1 writes it anew"
    );
}

/// The source that a test is in, and its name.
fn place(test: &str) -> (Vec<PathBuf>, &str) {
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
fn every_test_that_is_named_is_there() {
    let mut seen = 0;
    for (title, items) in PARTS {
        for (name, state, tests) in *items {
            assert!(
                !tests.is_empty() || matches!(state, Absent(_)),
                "{title}: nothing shows `{name}`"
            );
            for test in *tests {
                let (files, function) = place(test);
                let sources = files
                    .iter()
                    .filter_map(|file| std::fs::read_to_string(file).ok());
                let declared = format!("fn {function}(");
                let found = sources.into_iter().any(|source| source.contains(&declared));
                assert!(
                    found,
                    "{title}: `{name}` names the test {test}, which is not there"
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 80);
}

#[tokio::test]
async fn flags_are_what_the_table_says() {
    let (_server, client) = served(Transport::Websocket).await;
    let flags = client.session["environmentInfo"]["capabilities"].clone();
    let expected: serde_json::Map<String, Value> = FLAGS
        .iter()
        .map(|(name, state, _)| ((*name).to_owned(), json!(*state == Served)))
        .collect();
    assert_eq!(flags, Value::Object(expected));
}

#[tokio::test]
async fn methods_are_what_the_table_says() {
    let (_server, mut client) = served(Transport::Websocket).await;
    for (method, state, _) in METHODS {
        // Params that no method takes: whoever knows the method says so.
        let refused = client.refused(method, json!([[[]]])).await;
        let unknown = refused.code == -32601;
        assert_eq!(unknown, matches!(state, Absent(_)), "{method}: {refused}");
    }
}

#[tokio::test]
async fn a_server_describes_itself() {
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
async fn metadata_is_shown_to_the_command() {
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
        let start = exec_server_testkit::wire::Start::sh(&id, print).with("metadata", metadata);
        assert_eq!(client.run(start).await.text("stdout"), expected);
    }
}
