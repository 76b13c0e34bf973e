//! Order and independence of messages: what must follow what, and what must not wait.

use exec_server_testkit::wire::{ReceivedMessage, StartBuilder, TestedServer, Transport};
use serde_json::{Value, json};

use crate::{over_all, program, served};

over_all! {
    start_response_precedes_notifications_of_the_process,
    all_pipelined_requests_get_a_response,
    invalid_messages_are_rejected_and_the_connection_survives,
    error_for_an_unknown_method_names_it,
    concurrent_requests_1_handles_requests_one_by_one,
}

async fn start_response_precedes_notifications_of_the_process(on: Transport) {
    let (_server, mut client) = served(on).await;
    let mut starts = Vec::new();
    for n in 0..500 {
        let start = StartBuilder::new(&n.to_string(), &["/bin/echo", &n.to_string()]);
        starts.push(client.queue("process/start", start.0));
    }
    client.flush_and_take().await;
    for (n, start) in starts.iter().enumerate() {
        client.answer(*start).await.unwrap();
        let seen = client.closed(&n.to_string()).await;
        assert_eq!(seen.text("stdout"), format!("{n}\n"));
        assert_eq!(seen.exit_code(), 0);
    }
    // The order within each process is checked on arrival. This checks that no notification
    // preceded the response.
    let mut answered = vec![false; starts.len()];
    for seen in &client.order {
        match seen {
            ReceivedMessage::Answer(id) => {
                if let Ok(n) = starts.binary_search(id) {
                    answered[n] = true;
                }
            }
            ReceivedMessage::Notification(method, process) => {
                assert!(
                    answered[process.parse::<usize>().unwrap()],
                    "{method} of {process}"
                );
            }
        }
    }
}

async fn all_pipelined_requests_get_a_response(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "sleep 600").piped())
        .await;
    // The client reads while it sends in the first round, and only after everything was sent in the
    // second.
    for read_meanwhile in [true, false] {
        let mut sent = Vec::new();
        for n in 0..5000 {
            sent.push(match n % 5 {
                0 => client.queue("environment/status", Value::Null),
                1 => client.queue("process/read", json!({"processId": "p"})),
                2 => client.queue("no/such/method", Value::Null),
                3 => client.queue("fs/getMetadata", json!({"path": "file:///tmp"})),
                _ => client.queue(
                    "process/signal",
                    json!({"processId": "q", "signal": "kill"}),
                ),
            });
        }
        if read_meanwhile {
            client.flush_and_take().await;
        } else {
            client.flush().await;
        }
        for (n, id) in sent.into_iter().enumerate() {
            let answer = client.answer(id).await;
            assert_eq!(answer.is_err(), n % 5 == 2, "{n}: {answer:?}");
        }
    }
}

async fn invalid_messages_are_rejected_and_the_connection_survives(on: Transport) {
    let (_server, mut client) = served(on).await;
    for text in [
        r#"{"method":"no/such/notification"}"#,
        r#"{"method":"process/start","params":{}}"#,
        r#"{"id":1,"result":{}}"#,
        r#"{"id":"x","error":{"code":1,"message":"m"}}"#,
        "garbage",
        "{}",
        "[]",
        "\"text\"",
        r#"{"id":1,"id":2,"method":"environment/status"}"#,
        r#"{"id":null,"method":"environment/status"}"#,
        r#"{"id":1.5,"method":"environment/status"}"#,
        r#"{"id":1,"method":"environment/status"} trailing"#,
        r#"{"id":1,"method":"environment/status","params":{"a":{"b":1,"b":2}}}"#,
    ] {
        client.send_text(text).await;
        assert_eq!(client.refusal().await.code, -32600, "{text}");
    }
    let deep = format!(
        r#"{{"id":1,"method":"x","params":{}{}}}"#,
        "[".repeat(1000),
        "]".repeat(1000)
    );
    client.send_text(&deep).await;
    assert_eq!(client.refusal().await.code, -32600);
    let many = format!(
        r#"{{"id":1,"method":"x","params":[{}0]}}"#,
        "0,".repeat(300_000)
    );
    client.send_text(&many).await;
    assert_eq!(client.refusal().await.code, -32600);
    assert_eq!(
        client
            .run(StartBuilder::sh("p", "exit 3"))
            .await
            .exit_code(),
        3
    );
}

async fn error_for_an_unknown_method_names_it(on: Transport) {
    let mut server = TestedServer::start(on, program()).await;
    let mut client = server.connect().await;
    for state in ["new", "ready"] {
        let refused = client.refused("no/such", Value::Null).await;
        assert_eq!(refused.code, -32601, "{state}");
        assert!(refused.message.contains("`no/such`"), "{refused}");
        if state == "new" {
            client.initialize(json!({"clientName": "test"})).await;
        }
    }
    // A response has the id of its request, with the same type; `jsonrpc` is ignored.
    client.queue_text(r#"{"jsonrpc":"2.0","id":"text","method":"environment/status"}"#);
    client.queue_text(r#"{"id":-7,"method":"environment/status","params":{},"trace":{}}"#);
    client.flush().await;
    let mut answers = [client.text().await, client.text().await];
    answers.sort_unstable();
    assert_eq!(
        answers,
        [
            r#"{"id":"text","result":{"status":"ready"}}"#,
            r#"{"id":-7,"result":{"status":"ready"}}"#,
        ]
    );
}

async fn concurrent_requests_1_handles_requests_one_by_one(on: Transport) {
    let mut program = program();
    program.args(["--concurrent-requests", "1"]);
    let mut server = TestedServer::start(on, program).await;
    let mut client = server.session().await;
    client.start(StartBuilder::sh("p", "sleep 600")).await;
    let params = json!({"processId": "p", "waitMs": 100});
    let mut sent = Vec::new();
    for _ in 0..3 {
        sent.push(client.queue("process/read", params.clone()));
        sent.push(client.queue("environment/status", Value::Null));
    }
    client.flush().await;
    for id in &sent {
        client.answer(*id).await.unwrap();
    }
    let answered: Vec<_> = client
        .order
        .iter()
        .filter_map(|seen| match seen {
            ReceivedMessage::Answer(id) if sent.contains(id) => Some(*id),
            _ => None,
        })
        .collect();
    assert_eq!(answered, sent);
    // The end of a process is notified meanwhile, and the process can be terminated.
    client
        .ok("process/terminate", json!({"processId": "p"}))
        .await;
    assert_eq!(client.closed("p").await.exit_code(), 137);
}
