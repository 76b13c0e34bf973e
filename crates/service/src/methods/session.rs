//! Implementation of `initialize` and `session/*`.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::method::Empty;
use exec_server_protocol::session::{EndParams, InitializeParams, InitializeResponse};

use crate::ApiError;
use crate::connection::{Connection, HandshakePhase};
use crate::dispatch::CheckedRequest;
use crate::responder::RequestResponder;

/// Opens a session or resumes one.
pub(crate) fn initialize(
    connection: &Arc<Connection>,
    phase: &mut HandshakePhase,
    responder: RequestResponder,
    params: &InitializeParams,
) {
    if !matches!(phase, HandshakePhase::New) {
        let message = "initialize may only be sent once per connection";
        return responder.send_error(ApiError::invalid_request(message));
    }
    let server = &connection.server;
    let driver = connection.driver();
    let opened = match &params.resume_session_id {
        None => server.open(driver, params.detach_grace_ms),
        Some(id) => {
            let key = params.resume_key.as_deref();
            server.resume(id, driver, key, params.detach_grace_ms)
        }
    };
    let (session, grace) = match opened {
        Ok(opened) => opened,
        Err(error) => return responder.send_error(error),
    };
    tracing::info!(
        client = params.client_name,
        session = session.id,
        resumed = params.resume_session_id.is_some(),
        "session attached"
    );
    let grace = if connection.is_resumable() {
        grace.as_millis()
    } else {
        0
    };
    let short = InitializeResponse {
        session_id: session.id.clone(),
        environment_info: None,
        detach_grace_ms: Some(u64::try_from(grace).unwrap_or(u64::MAX)),
        resume_key: connection.is_resumable().then(|| session.resume_key()),
        server_instance: Some(server.instance().id.clone()),
        server_started_at_ms: Some(server.instance().started_at_ms),
    };
    let info = server.info_text();
    responder.send_result(info.len() + 256, |out| {
        // Appends one more field, whose JSON text is already encoded.
        let encoded = serde_json::to_writer(&mut *out, &short);
        debug_assert!(encoded.is_ok(), "texts and numbers always serialise");
        out.pop();
        out.extend_from_slice(b",\"environmentInfo\":");
        out.extend_from_slice(info.as_bytes());
        out.push(b'}');
    });
    // Called after the response was queued, so that notifications of resumed processes follow it.
    session.follow_all();
    *phase = HandshakePhase::Initialized(session);
}

/// Ends the session now; the connection may initialize again.
pub(crate) fn end(call: CheckedRequest<'_>, phase: &mut HandshakePhase, params: EndParams) {
    *phase = HandshakePhase::New;
    call.connection.requests.cancel_all();
    call.connection.searches.cancel();
    call.connection.watches.end();
    let (session, responder) = (call.session, call.responder);
    let server = call.connection.server.clone();
    // This task does not end with the connection: the session is ended in any case.
    tokio::spawn(async move {
        let grace = params
            .grace_ms
            .map_or(Duration::ZERO, Duration::from_millis);
        server.end_session(&Arc::clone(&session), grace).await;
        responder.send(Ok(Empty {}));
    });
}
