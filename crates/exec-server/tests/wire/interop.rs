//! The real server beside ours: answers that must be equal.

use exec_server_testkit::codex;
use exec_server_testkit::wire::WireClient;
use exec_server_transport::{ConnectOptions, connect::connect};
use serde_json::{Value, json};

use crate::catalog::{catalog, served, write_files};

#[tokio::test]
async fn catalog_equals_that_of_the_real_server() {
    let home = codex::CodexHome::new();
    write_files(&home.path());
    let real = codex::exec_server(&home, &[]).await;
    let link = connect(real.url(), &ConnectOptions::default())
        .await
        .unwrap();
    let mut real = WireClient::new(link);
    real.initialize(json!({"clientName": "test"})).await;
    let (_server, mut ours) = served(&home.path(), true).await;
    let (theirs, ours) = (catalog(&mut real).await, catalog(&mut ours).await);
    // The real program unpacks its own skills into `skills/.system` at an unspecified time.
    let comparable = |mut found: Value| {
        let skills = found["skills"].as_array_mut().unwrap();
        skills.retain(|skill| !skill["path"].as_str().unwrap().contains("/.system/"));
        found
    };
    assert_eq!(comparable(theirs), comparable(ours));
}
