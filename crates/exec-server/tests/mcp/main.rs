//! `exec-server mcp` and `mcp-proxy` as a black box, seen by an MCP client.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod client;
#[cfg(feature = "interop")]
mod clients;
mod commands;
mod config;
mod environments;
mod faults;
mod files;
mod http;
mod policies;
mod proxy;
mod replay;

/// A file that is not declared as a module here would not be compiled, and its tests would not run.
#[test]
fn every_test_file_is_declared() {
    let declared = include_str!("main.rs");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mcp")).unwrap();
    let mut seen = 0;
    for file in files {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        seen += 1;
        let is_declared = declared.contains(&format!("\nmod {name};\n"));
        assert!(name == "main" || is_declared, "{name} is not declared");
    }
    assert!(seen > 1);
}
