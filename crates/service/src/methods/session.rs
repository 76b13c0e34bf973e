//! `initialize` and `session/*`.

use std::sync::Arc;

use exec_server_protocol::NoParams;
use exec_server_protocol::method::Empty;
use exec_server_protocol::session::{InitializeParams, InitializeResponse};

use crate::connection::Phase;
use crate::dispatch::Call;
use crate::error::RpcError;

/// Opens a session or takes one up again.
pub(crate) fn initialize(call: Call<'_>, params: InitializeParams) {
    if !matches!(call.phase, Phase::New) {
        let message = "initialize may only be sent once per connection";
        return call
            .responder
            .send_error(RpcError::invalid_request(message));
    }
    let server = &call.connection.server;
    let driver = call.connection.driver();
    let opened = match &params.resume_session_id {
        None => server.open(driver, params.detach_grace_ms),
        Some(id) => {
            let key = params.resume_key.as_deref();
            server.resume(id, driver, key, params.detach_grace_ms)
        }
    };
    let (session, grace) = match opened {
        Ok(opened) => opened,
        Err(error) => return call.responder.send_error(error),
    };
    tracing::info!(
        client = params.client_name,
        session = session.id,
        resumed = params.resume_session_id.is_some(),
        "session attached"
    );
    let grace = if call.connection.is_resumable() {
        grace.as_millis()
    } else {
        0
    };
    let short = InitializeResponse {
        session_id: session.id.clone(),
        environment_info: None,
        detach_grace_ms: Some(u64::try_from(grace).unwrap_or(u64::MAX)),
        resume_key: call.connection.is_resumable().then(|| session.resume_key()),
    };
    let info = server.info_text();
    call.responder.send_result(info.len() + 256, |out| {
        // Another field, of which the text is there already.
        let encoded = serde_json::to_writer(&mut *out, &short);
        debug_assert!(encoded.is_ok(), "texts and numbers always serialise");
        out.pop();
        out.extend_from_slice(b",\"environmentInfo\":");
        out.extend_from_slice(info.as_bytes());
        out.push(b'}');
    });
    // After the answer, so that news of resumed processes does not come before it.
    session.follow_all();
    *call.phase = Phase::Initialized(session);
}

/// Ends the session now; the connection may initialize again.
pub(crate) fn end(call: Call<'_>, _: NoParams) {
    let session = match call.phase.ready("session") {
        Ok(session) => session,
        Err(error) => return call.responder.send_error(error),
    };
    *call.phase = Phase::New;
    call.connection.requests.cancel_all();
    call.connection.searches.cancel();
    call.connection.watches.end();
    let (server, responder) = (call.connection.server.clone(), call.responder);
    // Not tied to the connection: a session that was told to end ends.
    tokio::spawn(async move {
        server.end_session(&Arc::clone(&session)).await;
        responder.send(Ok(Empty {}));
    });
}
