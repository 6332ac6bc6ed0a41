package ops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// answerTime is what an action may take. Rows that somebody else has locked are waited for.
const answerTime = 15 * time.Second

// Config of a Service. The zero value serves the default schema.
type Config struct {
	Schema    outbox.Schema
	Namespace string // Optional, as the relay's
	Version   string // Optional, of the program
	// Wake is called after an action: the relay has something to look at. Optional.
	Wake   func()
	Logger zerolog.Logger
}

// A Service answers requests at taskrelay.ops.<action>.
type Service struct {
	pool   *pgxpool.Pool
	nc     *nats.Conn
	cfg    Config
	prefix string
	log    zerolog.Logger
	said   sync.Map // subjects whose refusal has been reported
}

// New makes a Service. Of the pool it uses one connection for each action that runs.
func New(pool *pgxpool.Pool, nc *nats.Conn, cfg Config) *Service {
	return &Service{pool: pool, nc: nc, cfg: cfg, prefix: outbox.Names{Namespace: cfg.Namespace}.Ops(),
		log: cfg.Logger.With().Str("component", "ops").Logger()}
}

// Run answers until ctx ends, then finishes what it has begun. It has no error: a relay goes on without it.
func (s *Service) Run(ctx context.Context) {
	// Before the service puts its own in front: a refused subscription is told of here only.
	reported := s.nc.ErrorHandler()
	s.nc.SetErrorHandler(func(nc *nats.Conn, sub *nats.Subscription, err error) {
		s.noteRefusal(err)
		if reported != nil {
			reported(nc, sub, err)
		}
	})
	defer s.nc.SetErrorHandler(reported)

	service, err := s.start(ctx)
	if err != nil {
		s.log.Error().Err(err).Msg("operator actions over NATS are off")
		<-ctx.Done()
		return
	}
	s.log.Info().Str("subject", s.prefix+".>").Msg("operator actions over NATS are on")
	<-ctx.Done()
	if err := service.Stop(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		s.log.Warn().Err(err).Msg("the NATS service did not stop in order")
	}
}

// Beside is run with the Service at its side.
func (s *Service) Beside(run func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		own, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { s.Run(own) })
		return run(ctx)
	}
}

func (s *Service) start(ctx context.Context) (micro.Service, error) {
	name := "taskrelay"
	if s.cfg.Namespace != "" {
		name += "-" + s.cfg.Namespace
	}
	service, err := micro.AddService(s.nc, micro.Config{
		Name: name, Version: semantic(s.cfg.Version), Description: "operator actions of taskrelay, audited",
		Metadata: map[string]string{"schema": s.cfg.Schema.String(), "build": s.cfg.Version},
	})
	if err != nil {
		return nil, fmt.Errorf("add the service: %w", err)
	}
	group := service.AddGroup(s.prefix)
	for _, a := range actions {
		err := group.AddEndpoint(a.name, micro.HandlerFunc(func(req micro.Request) { s.handle(ctx, a, req) }),
			micro.WithEndpointMetadata(map[string]string{"description": a.what, "request": a.example()}))
		if err != nil {
			_ = service.Stop()
			return nil, fmt.Errorf("add %s: %w", a.name, err)
		}
	}
	return service, nil
}

var version = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)

// semantic is a version as the micro protocol wants it; the build is in the metadata whatever it looks like.
func semantic(v string) string {
	if v = strings.TrimPrefix(v, "v"); version.MatchString(v) {
		return v
	}
	return "0.0.0"
}

var refusal = regexp.MustCompile(`Subscription to "([^"]+)"`)

// noteRefusal says once for each subject what a missing permission means.
func (s *Service) noteRefusal(err error) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return
	}
	m := refusal.FindStringSubmatch(err.Error())
	if m == nil {
		return
	}
	subject, ours := m[1], s.prefix+"."
	switch {
	case strings.HasPrefix(subject, ours):
		if _, said := s.said.LoadOrStore(subject, true); !said {
			s.log.Error().Str("subject", subject).Msg("operator action over NATS is off: the relay's NATS user may not subscribe to it")
		}
	case strings.HasPrefix(subject, "$SRV."):
		if _, said := s.said.LoadOrStore("$SRV.", true); !said {
			s.log.Warn().Str("subject", "$SRV.>").Msg("nats micro ls cannot show the service: the relay's NATS user may not subscribe to it")
		}
	}
}

// answer is the reply to an action. changed and skipped count results.
type answer struct {
	Changed int              `json:"changed"`
	Skipped int              `json:"skipped"`
	Results []map[string]any `json:"results"`
}

func (s *Service) handle(ctx context.Context, a action, req micro.Request) {
	c, err := a.parse(req.Data())
	if err != nil {
		s.refuse(req, a, "400", err.Error())
		return
	}
	// Not the relay's end: an action that has begun is finished.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
	defer cancel()
	ans, err := s.do(ctx, a, c)
	if err != nil {
		code, text := explain(err, s.pool.Config().ConnConfig.User, s.cfg.Schema.String())
		s.refuse(req, a, code, text)
		return
	}
	if a.name == "reset" && (len(ans.Results) == 0 || ans.Results[0]["id"] == nil) {
		s.refuse(req, a, "404", "no task has this biz_type and biz_id")
		return
	}
	s.log.Info().Str("action", a.name).Str("user", c.user).Int("changed", ans.Changed).Int("skipped", ans.Skipped).Msg("operator action over NATS")
	if s.cfg.Wake != nil {
		s.cfg.Wake()
	}
	if err := req.RespondJSON(ans); err != nil {
		s.log.Warn().Err(err).Str("action", a.name).Msg("answer to an operator action was not sent")
	}
}

func (s *Service) refuse(req micro.Request, a action, code, text string) {
	s.log.Warn().Str("action", a.name).Str("code", code).Str("error", text).Msg("operator action over NATS refused")
	body, err := json.Marshal(map[string]string{"error": text, "code": code}) // for clients that show no headers
	if err == nil {
		err = req.Error(code, oneLine(text), body)
	}
	if err != nil {
		s.log.Warn().Err(err).Str("action", a.name).Msg("answer to an operator action was not sent")
	}
}

// oneLine makes a header's value.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }), " ")
}

// do runs the function in a transaction that says for whom: what the caller claims, and the relay's login behind it.
func (s *Service) do(ctx context.Context, a action, c call) (ans answer, err error) {
	actor := "nats"
	if c.user != "" {
		actor += ":" + c.user
	}
	ans.Results = []map[string]any{}
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT set_config('taskrelay.actor', $1::text, true)`, actor); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, s.cfg.Schema.Render(a.sql(c)), c.args...)
		if err != nil {
			return err
		}
		ans.Results, err = pgx.CollectRows(rows, result)
		return err
	})
	for _, r := range ans.Results {
		if changed, _ := r["changed"].(bool); changed {
			ans.Changed++
		} else {
			ans.Skipped++
		}
	}
	return ans, err
}

// result is one row of a function: id, changed, why_not. Ids are texts in JSON.
func result(row pgx.CollectableRow) (map[string]any, error) {
	var raw []byte
	if err := row.Scan(&raw); err != nil {
		return nil, err
	}
	var r map[string]any
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.UseNumber()
	if err := d.Decode(&r); err != nil {
		return nil, err
	}
	if id, ok := r["id"].(json.Number); ok {
		r["id"] = id.String()
	}
	for name, v := range r {
		if v == nil {
			delete(r, name)
		}
	}
	return r, nil
}

// explain tells a caller what an error of Postgres means for the request. The codes are HTTP's.
func explain(err error, user, schema string) (code, text string) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case !ok:
		return "503", "no answer from Postgres, so it is not known whether the action was done: look, or send it again, which is harmless"
	case pgErr.Code == "42501":
		return "403", fmt.Sprintf("%s: as the owner, GRANT %s_operator TO %s", pgErr.Message, schema, user)
	case pgErr.Code == "42883":
		return "501", "this installation's schema does not have the action: run taskrelay migrate up"
	case strings.HasPrefix(pgErr.Code, "22"), strings.HasPrefix(pgErr.Code, "23"), pgErr.Code == "P0001", pgErr.Code == "P0002":
		text = pgErr.Message
		if pgErr.Hint != "" {
			text += ": " + pgErr.Hint
		}
		return "400", text
	case pgErr.Code == "57014", pgErr.Code == "55P03":
		return "503", "another transaction holds these rows: nothing was changed, try again"
	}
	return "500", pgErr.Message + " (SQLSTATE " + pgErr.Code + "): nothing was changed"
}
